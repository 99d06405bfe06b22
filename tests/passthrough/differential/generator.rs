//! Random programs.

/// Appends a call to the program.
macro_rules! call {
    ($generator:expr, $name:literal $(, $argument:expr)*) => {{
        let arguments = vec![$(json!($argument)),*];
        $generator.add($name, arguments)
    }};
}

mod special;

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use serde_json::{Value, json};

use super::program::{Actor, Disturbance, Program, Step};

/// The ordinary user among the actors.
pub const USER: u32 = 1000;

/// Slots of open files of each actor.
const SLOTS: u64 = 4;
const NAMES: [&str; 8] = ["d", "e", "f", "g", "h", "i", "l", "x"];
const TARGETS: [&str; 9] = ["d", "e", "f", "d/f", "../f", "..", ".", "e/l", "none"];
const ATTRIBUTES: [&str; 7] = [
    "user.a",
    "user.b",
    "trusted.t",
    "security.capability",
    "system.posix_acl_access",
    "system.posix_acl_default",
    "user.long",
];
/// Times that no call gives a file by itself, in nanoseconds since 1970.
const TIMES: [i64; 5] = [0, 1, 1_000_000_000_123_456_789, 4_000_000_000_000_000_001, -1_000_000_000];

/// A program for these actors. The first of them prepares some files. `may_make_subvolumes`: the host's process can do so.
pub fn program(random: &mut Rng, actors: &[Actor], may_make_subvolumes: bool) -> Program {
    let mut generator = Generator {
        random,
        by: actors[0],
        steps: Vec::new(),
        paths: BTreeMap::new(),
        open: BTreeSet::new(),
        maps: BTreeSet::new(),
        handles: BTreeSet::new(),
        directories: vec!["d", "e", "d", "e", "l", ".."],
    };
    let has_subvolumes = may_make_subvolumes && actors.contains(&Actor::H);
    if has_subvolumes {
        generator.prepare_subvolume();
    }
    generator.prepare();
    let length = generator.steps.len() + generator.random.usize(10..90);
    while generator.steps.len() < length {
        generator.by = generator.one_of(actors);
        for _ in 0..generator.random.usize(1..12) {
            generator.next(has_subvolumes);
        }
    }
    Program(generator.steps)
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    File,
    Directory,
    Other,
}

/// Generates calls, most of which succeed: it knows roughly which files there are and which are open.
struct Generator<'a> {
    random: &'a mut Rng,
    /// The actor of the next calls.
    by: Actor,
    steps: Vec<Step>,
    paths: BTreeMap<String, Kind>,
    open: BTreeSet<(Actor, u64)>,
    maps: BTreeSet<(Actor, u64)>,
    handles: BTreeSet<(Actor, u64)>,
    /// What a path may have before its last name.
    directories: Vec<&'static str>,
}

impl Generator<'_> {
    fn add(&mut self, name: &str, arguments: Vec<Value>) {
        self.steps.push(Step::Call { by: self.by, name: name.to_owned(), arguments });
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.usize(..all.len())]
    }

    fn one_in(&mut self, number: u32) -> bool {
        self.random.u32(..number) == 0
    }

    /// A slot for a file that is to be opened.
    fn new_slot(&mut self) -> u64 {
        let slot = self.random.u64(..SLOTS);
        self.open.insert((self.by, slot));
        slot
    }

    /// A slot, mostly of an open file.
    fn slot(&mut self) -> u64 {
        let open: Vec<_> = self.open.iter().filter(|(actor, _)| *actor == self.by).map(|(_, slot)| *slot).collect();
        if open.is_empty() && !self.one_in(10) {
            let path = self.path_of(Kind::File);
            let slot = self.new_slot();
            call!(self, "open", slot, path, "O_RDWR|O_CREAT", 0o666);
            return slot;
        }
        if open.is_empty() || self.one_in(30) { self.random.u64(..SLOTS) } else { self.one_of(&open) }
    }

    /// A path, mostly of a file that exists.
    fn path(&mut self) -> String {
        let known: Vec<_> = self.paths.keys().cloned().collect();
        if known.is_empty() || self.one_in(8) {
            self.new_path()
        } else {
            known[self.random.usize(..known.len())].clone()
        }
    }

    /// A path, mostly of a file of this kind that exists.
    fn path_of(&mut self, kind: Kind) -> String {
        let known: Vec<_> = self.paths.iter().filter(|(_, is)| **is == kind).map(|(path, _)| path.clone()).collect();
        if known.is_empty() || self.one_in(8) { self.path() } else { known[self.random.usize(..known.len())].clone() }
    }

    /// Any path.
    fn new_path(&mut self) -> String {
        let depth = self.one_of(&[1, 1, 1, 2, 2, 3]);
        let directories = self.directories.clone();
        let mut parts: Vec<_> = (1..depth).map(|_| self.one_of(&directories)).collect();
        // `..` leads out of the program's directory only behind a directory.
        if parts.first() == Some(&"..") {
            parts[0] = "d";
        }
        if parts.first() == Some(&"e") && !self.one_in(4) {
            parts[0] = "d";
        }
        parts.push(self.one_of(&NAMES));
        parts.join("/")
    }

    /// A path, and the note that it exists from now on.
    fn made_path(&mut self, kind: Kind) -> String {
        let path = self.new_path();
        self.paths.insert(path.clone(), kind);
        path
    }

    /// A path, and the note that it does not exist any more.
    fn gone_path(&mut self, kind: Kind) -> String {
        let path = self.path_of(kind);
        self.paths.remove(&path);
        path
    }

    /// A length or an offset; often at a boundary of pages.
    fn number(&mut self) -> u64 {
        let near = self.one_of(&[0, 512, 4096, 8192, 65_536, 131_072]);
        match self.random.u32(..4) {
            0 => self.random.u64(..64),
            1 => near,
            2 => near + self.random.u64(..32),
            _ => self.random.u64(..200_000),
        }
    }

    fn aligned(&mut self) -> u64 {
        self.random.u64(..8) * 4096
    }

    fn mode(&mut self) -> u32 {
        self.one_of(&[0o644, 0o666, 0o600, 0o777, 0o755, 0o700, 0, 0o4755, 0o2755, 0o6777, 0o1777, 0o2644, 0o444])
    }

    fn id(&mut self) -> i64 {
        self.one_of(&[-1, 0, USER as i64, USER as i64, 2000])
    }

    fn flags(&mut self) -> String {
        let mut flags = vec![self.one_of(&["O_RDONLY", "O_WRONLY", "O_RDWR", "O_RDWR"])];
        let others = [
            "O_TRUNC",
            "O_APPEND",
            "O_EXCL",
            "O_DIRECTORY",
            "O_NOFOLLOW",
            "O_DIRECT",
            "O_SYNC",
            "O_DSYNC",
            "O_NOATIME",
        ];
        if self.random.bool() {
            flags.push("O_CREAT");
        }
        while self.one_in(3) {
            flags.push(self.one_of(&others));
        }
        if self.one_in(20) {
            flags.push("O_PATH");
        }
        flags.dedup();
        flags.join("|")
    }

    /// Files with which most programs do more than collect errors.
    fn prepare(&mut self) {
        call!(self, "umask", 0);
        for path in ["d", "d/e"] {
            call!(self, "mkdir", path, 0o777);
            self.paths.insert(path.to_owned(), Kind::Directory);
        }
        for path in ["f", "d/f", "d/e/g"] {
            if !self.one_in(3) {
                let slot = self.new_slot();
                call!(self, "open", slot, path, "O_RDWR|O_CREAT", 0o666);
                let (seed, length) = (self.random.u8(..), self.number());
                call!(self, "write", slot, seed, length);
                self.paths.insert(path.to_owned(), Kind::File);
            }
        }
        if self.one_in(3) {
            let target = self.one_of(&TARGETS);
            call!(self, "symlink", target, "l");
            self.paths.insert("l".to_owned(), Kind::Other);
        }
        if self.random.bool() {
            call!(self, "umask", 0o022);
        }
    }

    fn next(&mut self, has_subvolumes: bool) {
        if has_subvolumes && self.one_in(60) {
            return self.subvolumes();
        }
        match self.random.u32(..400) {
            0..48 => self.open(),
            48..120 => self.data(),
            120..168 => self.look(),
            168..232 => self.names(),
            232..264 => self.attributes(),
            264..292 => self.extended_attributes(),
            292..324 => self.locks(),
            324..340 => self.locked_section(),
            340..364 => self.mappings(),
            364..384 => self.directories(),
            384..396 => self.unusual(),
            _ => self.disturb(),
        }
    }

    fn disturb(&mut self) {
        let disturbance = match self.random.u32(..9) {
            0..2 => Disturbance::DropCaches,
            2..4 => Disturbance::KillServer,
            4..6 => Disturbance::KillKeeper,
            6 => Disturbance::KillServerAndKeeper,
            _ => Disturbance::KillServerDuring,
        };
        self.steps.push(Step::Disturb(disturbance));
    }

    fn open(&mut self) {
        let (flags, mode) = (self.flags(), self.mode());
        let path = if flags.contains("O_CREAT") && self.one_in(3) {
            self.made_path(Kind::File)
        } else if flags.contains("O_DIRECTORY") {
            self.path_of(Kind::Directory)
        } else {
            self.path_of(Kind::File)
        };
        match self.random.u32(..12) {
            0..7 => call!(self, "open", self.new_slot(), path, flags, mode),
            7 => call!(self, "openat", self.new_slot(), self.slot(), path, flags, mode),
            8 => {
                let flags = flags.replace("|O_CREAT", "").replace("|O_EXCL", "");
                call!(self, "reopen", self.new_slot(), self.slot(), flags);
            }
            9 => {
                let other = self.slot();
                call!(self, "dup", self.new_slot(), other);
            }
            10 => {
                let directory = self.one_of(&[".", "d", "d/e", "l"]);
                let flags = self.one_of(&["O_TMPFILE|O_RDWR", "O_TMPFILE|O_WRONLY", "O_TMPFILE|O_RDWR|O_EXCL"]);
                call!(self, "open", self.new_slot(), directory, flags, mode);
            }
            _ => {
                let slot = self.slot();
                call!(self, "close", slot);
                self.open.remove(&(self.by, slot));
            }
        }
    }

    fn data(&mut self) {
        let slot = self.slot();
        let (length, offset, seed) = (self.number(), self.number(), self.random.u8(..));
        match self.random.u32(..24) {
            0..4 => call!(self, "pread", slot, length, offset),
            4..6 => call!(self, "read", slot, length),
            6..10 => call!(self, "pwrite", slot, seed, length, offset),
            10..13 => call!(self, "write", slot, seed, length),
            13 => {
                let flags = self.one_of(&["RWF_APPEND", "RWF_DSYNC", "RWF_SYNC"]);
                call!(self, "pwrite", slot, seed, length, offset, flags);
            }
            14 => {
                let whence = self.one_of(&["SEEK_SET", "SEEK_CUR", "SEEK_END", "SEEK_DATA", "SEEK_HOLE"]);
                call!(self, "lseek", slot, offset, whence);
            }
            15..17 => call!(self, "ftruncate", slot, length),
            17 => call!(self, "truncate", self.path_of(Kind::File), length),
            18 => {
                let modes =
                    ["", "KEEP_SIZE", "PUNCH_HOLE|KEEP_SIZE", "ZERO_RANGE", "ZERO_RANGE|KEEP_SIZE", "PUNCH_HOLE"];
                let mode = self.one_of(&modes);
                call!(self, "fallocate", slot, mode, offset, length + 1);
            }
            19 => call!(self, "copy", slot, self.slot(), length, offset, self.number()),
            20 => call!(self, "sendfile", slot, self.slot(), offset, length),
            // Aligned, for files opened with O_DIRECT.
            21 => call!(self, "pread", slot, self.aligned(), self.aligned()),
            22 => call!(self, "pwrite", slot, seed, self.aligned(), self.aligned()),
            _ => {
                let name = self.one_of(&["fsync", "fdatasync"]);
                self.add(name, vec![slot.into()]);
            }
        }
    }

    fn look(&mut self) {
        let (slot, path) = (self.slot(), self.path());
        match self.random.u32(..13) {
            0..3 => call!(self, "stat", path),
            3..5 => call!(self, "lstat", path),
            5..8 => call!(self, "fstat", slot),
            8 => call!(self, "readlink", path),
            9 => call!(self, "access", path, self.random.u8(..8)),
            10 => call!(self, "same", slot, path),
            11 => call!(self, "getfl", slot),
            _ => {
                let path = self.path_of(Kind::Directory);
                call!(self, "list", self.one_of(&[".", path.as_str()]));
            }
        }
    }

    fn names(&mut self) {
        match self.random.u32(..22) {
            0..3 => call!(self, "mkdir", self.made_path(Kind::Directory), self.mode()),
            3..6 => call!(self, "unlink", self.gone_path(Kind::File)),
            6 => call!(self, "unlink", self.gone_path(Kind::Other)),
            7 => call!(self, "rmdir", self.gone_path(Kind::Directory)),
            8..13 => self.rename(),
            13 => call!(self, "rename", self.path(), self.path(), "RENAME_EXCHANGE"),
            14..17 => {
                let path = self.path_of(Kind::File);
                call!(self, "link", path, self.made_path(Kind::File));
            }
            17 => {
                let slot = self.slot();
                call!(self, "linkfd", slot, self.made_path(Kind::File));
            }
            18..20 => call!(self, "symlink", self.one_of(&TARGETS), self.made_path(Kind::Other)),
            _ => {
                let kind = self.one_of(&["S_IFIFO", "S_IFSOCK", "S_IFREG", "S_IFCHR"]);
                call!(self, "mknod", self.made_path(Kind::Other), kind, self.mode() & 0o777);
            }
        }
    }

    fn rename(&mut self) {
        let path = self.path();
        let kind = self.paths.remove(&path).unwrap_or(Kind::File);
        let new = if self.random.bool() { self.path() } else { self.new_path() };
        self.paths.insert(new.clone(), kind);
        if self.one_in(5) {
            call!(self, "rename", path, new, "RENAME_NOREPLACE");
        } else {
            call!(self, "rename", path, new);
        }
    }

    fn attributes(&mut self) {
        let (slot, path, mode) = (self.slot(), self.path(), self.mode());
        let [uid, gid] = [self.id(), self.id()];
        let [accessed, modified] = [self.one_of(&TIMES), self.one_of(&TIMES)];
        match self.random.u32(..12) {
            0..3 => call!(self, "chmod", path, mode),
            3 => call!(self, "fchmod", slot, mode),
            4..6 => call!(self, "chown", path, uid, gid),
            6 => call!(self, "lchown", path, uid, gid),
            7 => call!(self, "fchown", slot, uid, gid),
            8..10 => call!(self, "times", path, accessed, modified, self.random.u8(..2)),
            10 => call!(self, "futimens", slot, accessed, modified),
            _ => call!(self, "umask", self.one_of(&[0, 0o022, 0o077])),
        }
    }

    fn extended_attributes(&mut self) {
        let (slot, path, name) = (self.slot(), self.path(), self.one_of(&ATTRIBUTES));
        match self.random.u32(..12) {
            0..4 => {
                let (name, value) = self.attribute();
                match self.one_of(&["", "", "XATTR_CREATE", "XATTR_REPLACE"]) {
                    "" => call!(self, "setxattr", path, name, value),
                    flags => call!(self, "setxattr", path, name, value, flags),
                }
            }
            4 => {
                let (name, value) = self.attribute();
                call!(self, "fsetxattr", slot, name, value);
            }
            5..7 => call!(self, "getxattr", path, name),
            7 => call!(self, "fgetxattr", slot, name),
            8 => call!(self, "listxattr", path),
            9 => call!(self, "removexattr", path, name),
            _ => {
                let kind = self.one_of(&["access", "default"]);
                let mode = self.random.u8(..8);
                // The owner, a named user, the group, the mask, and others.
                let entries = json!([
                    [1, 7, -1_i64 as u32],
                    [2, mode, USER],
                    [4, 5, -1_i64 as u32],
                    [16, self.random.u8(..8), -1_i64 as u32],
                    [32, self.random.u8(..8), -1_i64 as u32]
                ]);
                call!(self, "setacl", path, kind, entries);
            }
        }
    }

    fn attribute(&mut self) -> (&'static str, String) {
        match self.random.u32(..6) {
            // A capability to bind low ports, in the second version of the format.
            0 => ("security.capability", format!("\u{1}\0\0\u{2}\0\u{4}{}", "\0".repeat(14))),
            1 => ("trusted.t", "t".to_owned()),
            2 => ("user.long", "long".repeat(self.random.usize(..300))),
            _ => (self.one_of(&["user.a", "user.b"]), self.random.u8(..).to_string()),
        }
    }
}
