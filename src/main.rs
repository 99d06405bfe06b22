//! `podfs`: parse the arguments, call one function, tell how it ended.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: podfs::secrecy::ZeroingAllocator = podfs::secrecy::ZeroingAllocator;

fn main() -> ExitCode {
    podfs::cli::main()
}
