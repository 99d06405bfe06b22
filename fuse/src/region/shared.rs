//! Memory that several processes share: structs of atomics, and nothing else.
//!
//! A reference to such a struct stays sound whatever bytes another process writes: an atomic word may change at any time, and
//! every pattern of bits is a valid value.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// Memory that other processes may write at any time.
///
/// # Safety
/// The type is made of atomics alone, so that any bytes are a value of it, and a shared reference lets it change.
pub(crate) unsafe trait SharedMemory {}

// SAFETY: an atomic.
unsafe impl SharedMemory for AtomicU32 {}
// SAFETY: an atomic.
unsafe impl SharedMemory for AtomicU64 {}
// SAFETY: an array of atomics.
unsafe impl<T: SharedMemory, const N: usize> SharedMemory for [T; N] {}

/// The layout of a struct that servers of other versions read.
#[cfg(test)]
pub(crate) trait SharedLayout {
    /// The offsets of its fields, and its size.
    fn layout() -> String;
}

/// Fails if a struct has another layout than this.
#[cfg(test)]
#[track_caller]
pub(crate) fn assert_layout<T: SharedLayout>(expected: &str) {
    assert_eq!(
        T::layout(),
        expected,
        "servers of other versions read {}: give a changed layout a new number, and add a test that a region of the \
         layout before can still be adopted. A field that takes the place of `spare`, and on which no successor depends, needs \
         no new number",
        std::any::type_name::<T>()
    );
}

/// Declares structs of shared memory. They have the layout of C, and each of their fields is a [`SharedMemory`].
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

        #[cfg(test)]
        impl $crate::region::shared::SharedLayout for $name {
            fn layout() -> String {
                let fields = [$(format!("{} {}", stringify!($field), std::mem::offset_of!($name, $field))),*];
                format!("{}; {} bytes", fields.join(", "), size_of::<$name>())
            }
        }
    )* };
}
pub(crate) use shared;
