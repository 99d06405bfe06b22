//! The CPUs of the host and the parameter `enable_uring`, read by the supervisor: the server sees no `/sys`.

use std::fs;

/// Whether the kernel offers requests over io_uring to connections that begin now.
pub fn are_offered() -> bool {
    fs::read_to_string("/sys/module/fuse/parameters/enable_uring").is_ok_and(|enabled| enabled.trim() == "Y")
}

/// Returns the number of CPUs that this machine may have: the kernel makes a queue for each.
pub fn possible_cpus() -> Option<usize> {
    count(&fs::read_to_string("/sys/devices/system/cpu/possible").ok()?)
}

/// The number after the last CPU of a list such as `0-3,8-11`.
fn count(list: &str) -> Option<usize> {
    let last = list.trim().rsplit([',', '-']).next()?;
    last.parse::<usize>().ok()?.checked_add(1)
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn the_last_cpu_says_how_many_there_may_be() {
        for (list, expected) in
            [("0\n", Some(1)), ("0-1\n", Some(2)), ("0-3,8-11\n", Some(12)), ("", None), ("x", None)]
        {
            assert_eq!(count(list), expected, "{list:?}");
        }
    }
}
