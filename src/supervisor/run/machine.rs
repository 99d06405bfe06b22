//! The resources of this machine, for the downward API where no Node object has them.

use std::path::Path;

use rustix::fs::statvfs;
use rustix::system::sysinfo;

use crate::types::Allocatable;

/// The CPUs, the memory, and the size of the file system of the directory `volumes`, as far as the kernel reports them.
pub fn allocatable(volumes: &Path) -> Allocatable {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let memory = sysinfo();
    let disk = existing(volumes).and_then(|path| statvfs(path).ok());
    Allocatable {
        cpu_milli: cpus * 1000,
        memory_bytes: memory.totalram.saturating_mul(memory.mem_unit.into()),
        ephemeral_storage_bytes: disk.map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize)),
    }
}

/// The nearest directory above `path`, or `path` itself, that exists.
fn existing(path: &Path) -> Option<&Path> {
    path.ancestors().find(|ancestor| ancestor.is_dir())
}
