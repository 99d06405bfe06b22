//! `podfs-supervisor`: the supervisor of a pod of `podfs node`.

use std::process::ExitCode;

use podfs_fuse::memory_lock::allocator::ZeroingAllocator;

#[global_allocator]
static ALLOCATOR: ZeroingAllocator = ZeroingAllocator;

fn main() -> ExitCode {
    podfs::supervisor::program::main()
}
