//! `podfs-fuse`: the server of a pod.

use std::process::ExitCode;

use podfs_fuse::memory_lock::allocator::ZeroingAllocator;

#[global_allocator]
static ALLOCATOR: ZeroingAllocator = ZeroingAllocator;

fn main() -> ExitCode {
    podfs_fuse::program::main()
}
