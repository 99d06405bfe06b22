//! Memory that several processes share: structs of atomics, and nothing else.
//!
//! A reference to such a struct stays sound whatever bytes another process writes: an atomic word may change at any time, and
//! every pattern of bits is a valid value.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// Memory that others write at any time.
///
/// # Safety
/// The type is made of atomics alone, so that any bytes are a value of it, and a shared reference lets it change.
pub(crate) unsafe trait SharedMemory {}

// SAFETY: an atomic.
unsafe impl SharedMemory for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl SharedMemory for AtomicU64 {}
// SAFETY: elements of that kind, one after the other.
unsafe impl<T: SharedMemory, const N: usize> SharedMemory for [T; N] {}

/// Declares structs that are shared: with the layout that C gives them, of fields that are shared themselves.
macro_rules! shared {
    ($($(#[$meta:meta])* pub(crate) struct $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$meta])*
        #[repr(C)]
        pub(crate) struct $name { $($(#[$doc])* pub(crate) $field: $type),* }

        const _: () = {
            const fn is_shared<T: $crate::region::shared::SharedMemory>() {}
            $(is_shared::<$type>();)*
        };

        // SAFETY: the lines above are compiled only if each field is shared.
        unsafe impl $crate::region::shared::SharedMemory for $name {}
    )* };
}
pub(crate) use shared;
