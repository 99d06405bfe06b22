//! `podfs`: parse the arguments, call one function, tell how it ended.

use std::process::ExitCode;

use podfs_fuse::memory_lock::allocator::ZeroingAllocator;

#[global_allocator]
static ALLOCATOR: ZeroingAllocator = ZeroingAllocator;

fn main() -> ExitCode {
    podfs::cli::main()
}
