//! Which directories podfs trusts with its records: directories that only root can change.
//!
//! The lock files in the run directory record the paths that podfs unmounts and removes as root, and the sockets there receive
//! Secrets. A user that can write to the run directory, or put another directory in its place, could make podfs unmount and remove
//! other paths, and could receive Secrets. So podfs checks the whole path of the run directory:
//!
//! 1. The directory itself belongs to root, and no other user may write to it.
//! 2. The same holds for each directory above it. A directory above it may also be sticky, as `/tmp` is: in a sticky directory,
//!    other users may make files, but cannot replace the files of root.
//! 3. A symbolic link on the path belongs to root. podfs follows each link itself, and checks all directories on its way, too.
//! 4. If a directory has an ACL, the entries of the ACL count: the group bits of its mode are only the mask of these entries
//!    (`acl(5)`). The check does not know the ACLs of NFS version 4.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::lgetxattr;
use rustix::io::Errno;

/// Most symbolic links on a path, as for the kernel (`path_resolution(7)`).
const MOST_LINKS: usize = 40;
/// The attribute with the ACL of a file.
const ACL: &str = "system.posix_acl_access";

/// A directory that users other than root can change.
#[derive(Debug, thiserror::Error)]
#[error("{} {problem}, so podfs cannot trust what is in {}; {advice}", .at.display(), .directory.display())]
pub struct Untrusted {
    directory: PathBuf,
    at: PathBuf,
    problem: String,
    advice: &'static str,
}

impl From<Untrusted> for io::Error {
    fn from(untrusted: Untrusted) -> io::Error {
        io::Error::new(ErrorKind::PermissionDenied, untrusted)
    }
}

/// Checks a directory and the directories above it, as far as they exist.
///
/// # Errors
/// When a user other than root could change its entries.
pub fn check(directory: &Path) -> Result<(), Untrusted> {
    let absolute = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    let untrusted = |at: &Path, TrustProblem { problem, advice }| Untrusted {
        directory: directory.to_owned(),
        at: at.to_owned(),
        problem,
        advice,
    };
    let mut pending: VecDeque<OsString> = steps(&absolute).collect();
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    let root = std::fs::symlink_metadata(&at);
    root.map_or(Ok(()), |found| check_found(&at, &found, false)).map_err(|problem| untrusted(&at, problem))?;
    while let Some(step) = pending.pop_front() {
        if step == ".." {
            // The directory above was checked on the way.
            at.pop();
            continue;
        }
        at.push(step);
        // No other user can own a missing path. If stat(2) fails for another reason, podfs cannot use the path either.
        let Ok(found) = std::fs::symlink_metadata(&at) else { return Ok(()) };
        if !found.is_symlink() {
            check_found(&at, &found, false).map_err(|problem| untrusted(&at, problem))?;
            continue;
        }
        check_owner(&found).map_err(|problem| untrusted(&at, problem))?;
        let Ok(target) = std::fs::read_link(&at) else { return Ok(()) };
        links += 1;
        if links > MOST_LINKS {
            // The kernel does not use the path either.
            return Ok(());
        }
        at = if target.is_absolute() { PathBuf::from("/") } else { at.parent().unwrap_or(Path::new("/")).to_owned() };
        for step in steps(&target).collect::<Vec<_>>().into_iter().rev() {
            pending.push_front(step);
        }
    }
    let Ok(found) = std::fs::symlink_metadata(&at) else { return Ok(()) };
    check_found(&at, &found, true).map_err(|problem| untrusted(&at, problem))
}

/// The steps of a path below its beginning: names, and `..`.
fn steps(path: &Path) -> impl Iterator<Item = OsString> {
    let is_step = |component: &Component<'_>| matches!(component, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_step).map(|component| component.as_os_str().to_owned())
}

/// Why a file cannot be trusted.
struct TrustProblem {
    problem: String,
    advice: &'static str,
}

impl TrustProblem {
    fn new(problem: String, advice: &'static str) -> TrustProblem {
        TrustProblem { problem, advice }
    }
}

/// Checks a file or directory of the path. Other users may not replace the entries of a directory. If it is the last directory of the
/// path, they may not add entries either.
fn check_found(path: &Path, found: &Metadata, is_last: bool) -> Result<(), TrustProblem> {
    const STICKY: u32 = 0o1000;
    check_owner(found)?;
    if !found.is_dir() || (!is_last && found.mode() & STICKY != 0) {
        return Ok(());
    }
    let entries = acl(path).map_err(|errno| {
        let problem = format!("has an ACL that podfs cannot read ({errno})");
        TrustProblem::new(problem, "remove the ACL, or choose another directory")
    })?;
    let by_mode = is_writable_by_mode(found, entries.as_deref());
    if by_mode {
        let mode = found.mode() & 0o7777;
        let problem = format!("can be written to by other users (mode {mode:04o})");
        return Err(TrustProblem::new(problem, "take that right away, or choose another"));
    }
    match entries.and_then(|entries| entries.into_iter().find_map(AclEntry::writer)) {
        Some(writer) => Err(TrustProblem::new(
            format!("can be written to by {writer}, which its ACL names"),
            "remove that entry (setfacl -x), or choose another directory",
        )),
        None => Ok(()),
    }
}

/// Whether the file belongs to root, or to the user that this program runs as.
fn check_owner(found: &Metadata) -> Result<(), TrustProblem> {
    match found.uid() == 0 || is_own_user(found.uid()) {
        true => Ok(()),
        false => {
            let problem = format!("belongs to uid {}", found.uid());
            Err(TrustProblem::new(problem, "give it to root, or choose another directory"))
        }
    }
}

fn is_own_user(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// Whether the group of a directory, or all users, may write to it.
fn is_writable_by_mode(found: &Metadata, acl: Option<&[AclEntry]>) -> bool {
    const GROUP: u32 = 0o020;
    const OTHERS: u32 = 0o002;
    let group = match acl {
        // With an ACL, the group bits are the mask of its entries.
        Some(entries) => entries.iter().any(|entry| entry.kind == AclKind::OwningGroup && entry.may_write),
        None => found.mode() & GROUP != 0,
    };
    (group && found.gid() != 0) || found.mode() & OTHERS != 0
}

/// An entry of an ACL that gives rights beyond those of the owner and of all users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    kind: AclKind,
    id: u32,
    may_write: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AclKind {
    User,
    OwningGroup,
    Group,
}

impl AclEntry {
    /// The user or group with the right to write, if the entry names one that is not root's.
    fn writer(self) -> Option<String> {
        let name = match self.kind {
            AclKind::User if self.id != 0 && !is_own_user(self.id) => format!("uid {}", self.id),
            AclKind::Group if self.id != 0 => format!("gid {}", self.id),
            _ => return None,
        };
        self.may_write.then_some(name)
    }
}

/// The entries of a directory's ACL; `None` without an ACL.
fn acl(path: &Path) -> Result<Option<Vec<AclEntry>>, Errno> {
    // The kernel's limit for the values of attributes.
    let mut value = vec![0; 64 << 10];
    match lgetxattr(path, ACL, &mut value[..]) {
        Ok(length) => parse_acl(&value[..length]).map(Some).ok_or(Errno::INVAL),
        // NODATA: it has none. OPNOTSUPP: the file system has none. NOENT: it is gone, and so is the danger.
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Parses the attribute (`linux/posix_acl_xattr.h`): a version, then entries of a tag, rights and an id, in little-endian order.
fn parse_acl(value: &[u8]) -> Option<Vec<AclEntry>> {
    const VERSION: u32 = 2;
    const WRITE: u16 = 2;
    const MASK: u16 = 0x10;
    let (version, entries) = value.split_first_chunk::<4>()?;
    let (entries, rest) = entries.as_chunks::<8>();
    if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() {
        return None;
    }
    let entry = |[t0, t1, r0, r1, id @ ..]: &[u8; 8]| {
        (u16::from_le_bytes([*t0, *t1]), u16::from_le_bytes([*r0, *r1]), u32::from_le_bytes(*id))
    };
    let entries: Vec<_> = entries.iter().map(entry).collect();
    let mask = entries.iter().find(|(tag, ..)| *tag == MASK).map_or(u16::MAX, |(_, rights, _)| *rights);
    let of_kind = |(tag, rights, id): (u16, u16, u32)| {
        let kind = match tag {
            0x02 => AclKind::User,
            0x04 => AclKind::OwningGroup,
            0x08 => AclKind::Group,
            _ => return None,
        };
        Some(AclEntry { kind, id, may_write: rights & mask & WRITE != 0 })
    };
    Some(entries.into_iter().filter_map(of_kind).collect())
}

/// Opens a regular file of the run directory without following links. `O_NONBLOCK`, because open(2) of a FIFO would
/// wait for another process.
///
/// # Errors
/// Those of `open(2)`, and when it is no regular file.
pub fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file; remove it"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn refusal(directory: &Path) -> String {
        check(directory).expect_err("others can change it").to_string()
    }

    #[test]
    fn a_directory_is_trusted_if_only_root_can_change_its_path() {
        let own = tempfile::tempdir().expect("a directory");
        let (parent, inner) = (own.path().join("parent"), own.path().join("parent/inner"));
        fs::create_dir_all(&inner).expect("directories");
        let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode");
        check(&inner).expect("root's own, below a sticky directory");
        check(&inner.join("to/be/made")).expect("root will make it");

        for mode in [0o777, 0o1777] {
            set(&inner, mode);
            assert!(refusal(&inner).contains("inner can be written to by other users (mode"), "{mode:o}");
        }
        set(&inner, 0o755);
        set(&parent, 0o777);
        assert!(refusal(&inner).contains("parent can be written to by other users (mode 0777)"));
        set(&parent, 0o1777);
        check(&inner).expect("no other user can replace it");
        chown(&inner, Some(65534), None).expect("its owner");
        assert!(refusal(&inner).contains("inner belongs to uid 65534"));
        chown(&inner, Some(0), Some(65534)).expect("its owner");
        set(&inner, 0o775);
        assert!(refusal(&inner).contains("(mode 0775)"));
    }

    #[test]
    fn links_on_the_way_are_checked() {
        let own = tempfile::tempdir().expect("a directory");
        let (open, link) = (own.path().join("open"), own.path().join("link"));
        fs::create_dir_all(open.join("run")).expect("directories");
        fs::set_permissions(&open, Permissions::from_mode(0o777)).expect("its mode");
        symlink(open.join("run"), &link).expect("a link");
        assert!(refusal(&link).contains("open can be written to by other users"));
    }

    #[test]
    fn each_directory_on_the_way_of_links_is_checked() {
        let own = tempfile::tempdir().expect("a directory");
        let path = |name: &str| own.path().join(name);
        // first -> open/second -> ../run: the directory `open` is neither on the path nor on that to which it leads.
        for directory in ["open", "run"] {
            fs::create_dir(path(directory)).expect("a directory");
        }
        symlink("open/second", path("first")).expect("a link");
        symlink("../run", path("open/second")).expect("a link");
        check(&path("first")).expect("root's own");
        fs::set_permissions(path("open"), Permissions::from_mode(0o777)).expect("its mode");
        assert!(refusal(&path("first")).contains("open can be written to by other users (mode 0777)"));
        assert!(refusal(&path("first/to/be/made")).contains("open can be written to by other users (mode 0777)"));
        fs::set_permissions(path("open"), Permissions::from_mode(0o1777)).expect("its mode");
        check(&path("first")).expect("no other user can replace the link");
        symlink(path("loop"), path("loop")).expect("a link");
        check(&path("loop")).expect("it leads nowhere");
        fs::create_dir(path("open/x")).expect("a directory");
        assert!(refusal(&path("open/x/..")).contains("(mode 1777)"), "it is the last one");
    }

    #[test]
    fn acl_entries_that_let_others_write_are_refused() {
        let own = tempfile::tempdir().expect("a directory");
        let (parent, inner) = (own.path().join("parent"), own.path().join("parent/inner"));
        fs::create_dir_all(&inner).expect("directories");
        // (tag, rights, id) of the entries after those of the owner, the owning group, the mask and all users.
        let set = |path: &Path, group: u16, mask: u16, named: &[(u16, u16, u32)]| {
            let owner = [(0x01, 7, u32::MAX)];
            let mut entries = owner.to_vec();
            entries.extend(named.iter().filter(|(tag, ..)| *tag == 0x02));
            entries.push((0x04, group, u32::MAX));
            entries.extend(named.iter().filter(|(tag, ..)| *tag == 0x08));
            entries.extend([(0x10, mask, u32::MAX), (0x20, 5, u32::MAX)]);
            let mut value = 2_u32.to_le_bytes().to_vec();
            for (tag, rights, id) in entries {
                value.extend(tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain(id.to_le_bytes()));
            }
            rustix::fs::lsetxattr(path, ACL, &value, rustix::fs::XattrFlags::empty())
        };
        if set(&inner, 5, 5, &[(0x02, 7, 4711)]) == Err(Errno::OPNOTSUPP) {
            return;
        }
        check(&inner).expect("the mask takes the right away");
        set(&inner, 5, 7, &[(0x02, 7, 4711)]).expect("an ACL");
        let refused = refusal(&inner);
        assert!(
            refused.contains("inner can be written to by uid 4711, which its ACL names, so podfs cannot"),
            "{refused}"
        );
        set(&inner, 5, 7, &[(0x08, 7, 4712)]).expect("an ACL");
        assert!(refusal(&inner).contains("by gid 4712, which its ACL names"));
        set(&inner, 5, 7, &[(0x02, 5, 4711), (0x08, 7, 0)]).expect("an ACL");
        check(&inner).expect("root's group may");
        set(&parent, 5, 7, &[(0x02, 7, 4711)]).expect("an ACL");
        assert!(refusal(&inner).contains("parent can be written to by uid 4711"));
        fs::set_permissions(&parent, Permissions::from_mode(0o1775)).expect("its mode");
        check(&inner).expect("no other user can replace it");
        // The group bits of the mode are the mask.
        chown(&inner, Some(0), Some(65534)).expect("its owner");
        set(&inner, 5, 7, &[(0x08, 5, 4712)]).expect("an ACL");
        check(&inner).expect("the group itself may not");
        set(&inner, 7, 7, &[(0x08, 5, 4712)]).expect("an ACL");
        assert!(refusal(&inner).contains("(mode 0775)"));
    }

    #[test]
    fn only_regular_files_are_opened() {
        let own = tempfile::tempdir().expect("a directory");
        let path = |name: &str| own.path().join(name);
        fs::write(path("file"), "x").expect("written");
        symlink(path("file"), path("link")).expect("a link");
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        open(OpenOptions::new().read(true), &path("file")).expect("a file");
        open(OpenOptions::new().read(true), &path("link")).expect_err("a link");
        open(OpenOptions::new().read(true), &path("fifo")).expect_err("a FIFO, and nothing waits for its writer");
        open(OpenOptions::new().read(true).write(true), &path("fifo")).expect_err("a FIFO");
    }
}
