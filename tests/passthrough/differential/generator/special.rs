//! Calls about locks, mappings, streams of directories, subvolumes, and those that few programs make.

use serde_json::json;

use super::super::program::Actor;
use super::{Generator, Kind, NAMES};

impl Generator<'_> {
    /// A subvolume in the directory of the program, and in half of all programs one inside it.
    pub(super) fn prepare_subvolume(&mut self) {
        let by = std::mem::replace(&mut self.by, Actor::H);
        call!(self, "umask", 0);
        let all = if self.random.bool() { &["s", "s/s"][..] } else { &["s"] };
        for path in all {
            call!(self, "subvolume", path);
            call!(self, "chmod", path, 0o777);
            self.paths.insert((*path).to_owned(), Kind::Directory);
        }
        self.directories.extend(["s", "s", "s"]);
        self.by = by;
    }

    /// A process of the host makes a subvolume or a snapshot.
    pub(super) fn subvolumes(&mut self) {
        self.by = Actor::H;
        let path = self.path_of(Kind::Directory);
        if self.random.bool() {
            call!(self, "subvolume", self.made_path(Kind::Directory));
        } else {
            let source = if self.random.bool() { "s".to_owned() } else { path };
            call!(self, "snapshot", source, self.made_path(Kind::Directory));
        }
    }

    pub(super) fn locks(&mut self) {
        let slot = self.slot();
        let kind = self.one_of(&["read", "write", "none"]);
        let (start, length) = (self.random.u64(..4) * 10, self.random.u64(..4) * 10);
        match self.random.u32(..9) {
            0..3 => call!(self, "flock", slot, self.one_of(&["LOCK_SH", "LOCK_EX", "LOCK_EX", "LOCK_UN"])),
            3..5 => call!(self, "posix", slot, kind, start, length),
            5..7 => call!(self, "ofd", slot, kind, start, length),
            7 => call!(self, "posixget", slot, self.one_of(&["read", "write"]), start, length),
            _ => call!(self, "ofdget", slot, self.one_of(&["read", "write"]), start, length),
        }
    }

    /// A process takes a lock, looks at the file, and appends to it.
    pub(super) fn locked_section(&mut self) {
        let slot = self.slot();
        let kind = self.random.u32(..3);
        match kind {
            0 => call!(self, "flock", slot, "LOCK_EX"),
            1 => call!(self, "posix", slot, "write", 0, 0),
            _ => call!(self, "ofd", slot, "write", 0, 0),
        }
        call!(self, "fstat", slot);
        call!(self, "pread", slot, 4096, 0);
        call!(self, "lseek", slot, 0, "SEEK_END");
        call!(self, "write", slot, self.random.u8(..), self.random.u8(..));
        call!(self, "fstat", slot);
        match kind {
            0 => call!(self, "flock", slot, "LOCK_UN"),
            1 => call!(self, "posix", slot, "none", 0, 0),
            _ => call!(self, "ofd", slot, "none", 0, 0),
        }
    }

    pub(super) fn mappings(&mut self) {
        let mapped: Vec<_> = self.maps.iter().filter(|(actor, _)| *actor == self.by).map(|(_, map)| *map).collect();
        let (offset, length) = (self.random.u64(..12_000), self.random.u64(1..5_000));
        match (self.random.u32(..8), mapped.first()) {
            (0..2, _) | (_, None) => {
                let number = self.random.u64(..2);
                self.maps.insert((self.by, number));
                let protection = self.one_of(&["PROT_READ", "PROT_READ|PROT_WRITE", "PROT_READ|PROT_WRITE"]);
                let flags = self.one_of(&["MAP_SHARED", "MAP_SHARED", "MAP_PRIVATE"]);
                let start = self.one_of(&[0, 0, 4096]);
                call!(self, "mmap", number, self.slot(), protection, flags, start, 4096 * self.random.u64(1..5));
            }
            (2..4, _) => call!(self, "load", self.one_of(&mapped), offset, length),
            (4..6, _) => call!(self, "store", self.one_of(&mapped), self.random.u8(..), offset, length),
            (6, _) => call!(self, "msync", self.one_of(&mapped)),
            (_, Some(number)) => {
                self.maps.remove(&(self.by, *number));
                call!(self, "munmap", *number);
            }
        }
    }

    pub(super) fn directories(&mut self) {
        let directory = self.path_of(Kind::Directory);
        match self.random.u32(..8) {
            0..5 => {
                let slot = self.new_slot();
                call!(self, "open", slot, directory, "O_RDONLY|O_DIRECTORY");
                for _ in 0..self.random.u32(1..5) {
                    match self.random.u32(..6) {
                        0..3 => call!(self, "readdir", slot, self.random.u8(1..5)),
                        3 => call!(self, "rewind", slot),
                        4 => call!(self, "tell", slot, self.random.u8(..2)),
                        _ => call!(self, "seekdir", slot, self.random.u8(..2)),
                    }
                }
            }
            5..7 => {
                call!(self, "chdir", directory);
                for _ in 0..self.random.u32(1..4) {
                    let name = self.one_of(&NAMES);
                    match self.random.u32(..7) {
                        0 => call!(self, "open", self.new_slot(), name, self.flags(), self.mode()),
                        1 => call!(self, "mkdir", name, self.mode()),
                        2 => call!(self, "unlink", name),
                        3 => call!(self, "stat", name),
                        4 => call!(self, "list", "."),
                        5 => call!(self, "getcwd"),
                        _ => call!(self, "rename", name, self.one_of(&NAMES)),
                    }
                }
                let depth = directory.matches('/').count() + 1;
                call!(self, "chdir", vec![".."; depth].join("/"));
            }
            _ => call!(self, "fchdir", self.slot()),
        }
    }

    /// Calls that few programs make.
    pub(super) fn unusual(&mut self) {
        let (slot, path) = (self.slot(), self.path());
        match self.random.u32(..16) {
            0..6 => match self.handles.iter().find(|(actor, _)| *actor == self.by) {
                Some((_, number)) if self.random.bool() => {
                    let number = *number;
                    let flags = self.one_of(&["O_RDONLY", "O_RDWR", "O_PATH"]);
                    call!(self, "openhandle", self.new_slot(), number, flags);
                }
                _ => {
                    let number = self.random.u64(..2);
                    self.handles.insert((self.by, number));
                    call!(self, "handle", number, path);
                }
            },
            6..8 => call!(self, "setfl", slot, self.one_of(&["O_APPEND", "O_APPEND", ""])),
            8..12 => call!(self, "rename", path, self.path(), "RENAME_WHITEOUT"),
            12 => call!(self, "rename", path, self.path(), "RENAME_WHITEOUT|RENAME_NOREPLACE"),
            13 => call!(self, "setfl", slot, "O_DIRECT"),
            _ => {
                let mode = self.one_of(&["COLLAPSE_RANGE", "INSERT_RANGE", "UNSHARE_RANGE"]);
                call!(self, "fallocate", slot, mode, self.aligned(), self.aligned() + 4096);
            }
        }
    }
}
