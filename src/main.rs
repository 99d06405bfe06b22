//! `podfs`: parse the arguments, call one function, report its outcome.

use std::process::ExitCode;

use podfs_fuse::memory_lock::allocator::ZeroingAllocator;

#[global_allocator]
static ALLOCATOR: ZeroingAllocator = ZeroingAllocator;

fn main() -> ExitCode {
    podfs::cli::main()
}
