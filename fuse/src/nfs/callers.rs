//! Credentials of callers: their supplementary groups.
//!
//! A request has the user, the group and the thread of its caller. The groups are in `/proc/<thread>/status`, which is opened
//! once for each thread and read again after [`HOLDS`]: what is open stays the same thread's, and cannot be read any more once
//! that is gone. A thread that changes its user or group is noticed at once, from the next request.
//!
//! Of `/proc/<thread>` only `status` and `uid_map` may be read here. A program that is executed closes files, and waits for the
//! answer to FLUSH, while it holds what `stat`, `cmdline` and others wait for: the answer would never come.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use lru::LruCache;

use super::options::Callers as As;
use super::rpc::Credential;
use super::rpc::credential::MAX_GROUPS;
use crate::session::Caller;

/// Threads that are remembered.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(128).expect("it is not zero");
/// How long the groups of a thread are believed, if its user and group are what they were.
const HOLDS: Duration = Duration::from_secs(1);
/// Room for all of a status: 65,536 groups are the kernel's limit.
const LONGEST: usize = 1 << 16;

/// What is remembered of callers.
pub struct Callers {
    identity: As,
    known: RefCell<LruCache<u32, Thread>>,
    /// The ids of the pod, from the first request of one of its processes.
    pod: Cell<Option<Ids>>,
}

struct Thread {
    status: File,
    uid: u32,
    gid: u32,
    credential: Credential,
    at: Instant,
}

impl Callers {
    /// Without any caller yet. `identity` says which credentials calls have.
    pub fn new(identity: As) -> Self {
        Self { identity, known: RefCell::new(LruCache::new(REMEMBERED)), pod: Cell::new(None) }
    }

    /// The credential of a call for `caller`. A caller whose status cannot be read has only the group of the request.
    pub fn credential(&self, caller: Caller) -> Credential {
        if self.identity == As::AsNobody {
            return Credential::Nobody;
        }
        let plain = || Credential::User { uid: told(caller.uid), gid: told(caller.gid), groups: Vec::new() };
        if caller.pid == 0 {
            return plain();
        }
        let mut known = self.known.borrow_mut();
        if let Some(thread) = known.get_mut(&caller.pid) {
            // In an ID-mapped mount requests name no user, so a change of user would not be noticed.
            let same = (thread.uid, thread.gid) == (caller.uid, caller.gid) && self.identity == As::AsTheyAre;
            if same && thread.at.elapsed() < HOLDS {
                return thread.credential.clone();
            }
            if let Ok(status) = read(&thread.status) {
                (thread.uid, thread.gid, thread.at) = (caller.uid, caller.gid, Instant::now());
                thread.credential = self.as_told(&status, caller);
                return thread.credential.clone();
            }
            // Another thread has the number now, or none.
            known.pop(&caller.pid);
        }
        let Ok(file) = File::open(format!("/proc/{}/status", caller.pid)) else { return plain() };
        let Ok(status) = read(&file) else { return plain() };
        let credential = self.as_told(&status, caller);
        let Caller { uid, gid, .. } = caller;
        let thread = Thread { status: file, uid, gid, credential: credential.clone(), at: Instant::now() };
        known.put(caller.pid, thread);
        credential
    }

    fn as_told(&self, status: &str, caller: Caller) -> Credential {
        let groups = numbers(status, "Groups:").take(MAX_GROUPS).collect();
        match self.identity {
            As::AsNobody => Credential::Nobody,
            As::AsTheyAre => Credential::User { uid: caller.uid, gid: caller.gid, groups },
            As::AsInTheirNamespace => {
                let ids = self.ids(caller.pid);
                // The fourth is the one for files (`fsuid`).
                let own = |key| ids.inside(numbers(status, key).nth(3).unwrap_or(NOBODY));
                // Requests that create something carry the id, as the mount maps it.
                let pick = |told: u32, found: u32| if told == UNTOLD { found } else { told };
                Credential::User {
                    uid: pick(caller.uid, own("Uid:")),
                    gid: pick(caller.gid, own("Gid:")),
                    groups: groups.into_iter().map(|group| ids.inside(group)).collect(),
                }
            }
        }
    }

    /// How the mount maps the ids of a caller. Any process of a pod may make a user namespace and be root there; that is not the
    /// namespace of the mount, so its ids do not count.
    fn ids(&self, pid: u32) -> Ids {
        let map = |pid: &str| fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap_or_default();
        let (theirs, ours) = (map(&pid.to_string()), map("self"));
        if theirs == ours {
            return Ids::All;
        }
        if let Some(ids) = Ids::of_pod(&theirs) {
            self.pod.set(Some(ids));
        }
        self.pod.get().unwrap_or(Ids::None)
    }
}

/// What the kernel says where it does not tell.
const UNTOLD: u32 = u32::MAX;
/// The kernel's overflow id, for ids that are not mapped.
const NOBODY: u32 = 65534;
/// Ids that the kubelet gives a pod at least. They begin at a multiple of it.
const OF_A_POD: u32 = 1 << 16;

/// Which ids of the host there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ids {
    /// All: the caller is in no other user namespace than this process.
    All,
    /// So many from this one on, as those from 0 on.
    Pod(u32, u32),
    /// It is not known.
    None,
}

impl Ids {
    /// Those of a pod's namespace, if `map` is of one. A process without privilege cannot make one that looks so: it may map no
    /// more than a single id (`user_namespaces(7)`). A process with the privilege is root in the pod already.
    fn of_pod(map: &str) -> Option<Self> {
        let mut numbers = map.split_whitespace().map(str::parse::<u32>);
        let (inside, outside, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let is_one = inside == 0 && count > 0 && outside % OF_A_POD == 0 && count % OF_A_POD == 0;
        (is_one && numbers.next().is_none()).then_some(Self::Pod(outside, count))
    }

    fn inside(self, id: u32) -> u32 {
        match self {
            Self::All => id,
            Self::Pod(first, count) => id.checked_sub(first).filter(|inside| *inside < count).unwrap_or(NOBODY),
            Self::None => NOBODY,
        }
    }
}

fn told(id: u32) -> u32 {
    if id == UNTOLD { NOBODY } else { id }
}

fn read(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; 4096];
    let mut length = 0;
    loop {
        match file.read_at(&mut bytes[length..], length as u64)? {
            0 => break,
            more => length += more,
        }
        if length == bytes.len() {
            if length >= LONGEST {
                break;
            }
            bytes.resize(length * 2, 0);
        }
    }
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

fn numbers<'a>(status: &'a str, key: &str) -> impl Iterator<Item = u32> + use<'a> {
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().map_while(|word| word.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn this_thread() -> Caller {
        let pid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        Caller { uid: 0, gid: 0, pid }
    }

    #[test]
    fn a_caller_has_the_groups_that_the_kernel_says_it_has() {
        let own = rustix::process::getgroups().expect("groups");
        let own: Vec<u32> = own.into_iter().map(rustix::fs::Gid::as_raw).take(MAX_GROUPS).collect();
        let callers = Callers::new(As::AsTheyAre);
        for _ in 0..2 {
            let Credential::User { uid: 0, gid: 0, mut groups } = callers.credential(this_thread()) else {
                panic!("a user")
            };
            let mut own = own.clone();
            groups.sort_unstable();
            own.sort_unstable();
            assert_eq!(groups, own);
        }
    }

    #[test]
    fn who_cannot_be_looked_at_has_no_groups() {
        let callers = Callers::new(As::AsTheyAre);
        for pid in [0, u32::MAX >> 1] {
            let told = callers.credential(Caller { uid: 7, gid: 8, pid });
            assert_eq!(told, Credential::User { uid: 7, gid: 8, groups: Vec::new() });
        }
    }

    #[test]
    fn ids_of_a_pod_are_mapped_and_others_are_nobodys() {
        let ids = Ids::of_pod("         0     131072      65536\n").expect("of a pod");
        assert_eq!([131_072, 132_071, 5, 0, 196_608].map(|id| ids.inside(id)), [0, 999, NOBODY, NOBODY, NOBODY]);
        assert_eq!(Ids::None.inside(0), NOBODY);
    }

    #[test]
    fn who_is_root_only_in_a_namespace_of_its_own_is_not_believed() {
        for map in ["0 132071 1", "0 131072 1\n1 131073 65535", "5 131072 65536", "0 131072 1000", "", "0 1", "x y z"] {
            assert_eq!(Ids::of_pod(map), None, "{map}");
        }
        let callers = Callers::new(As::AsInTheirNamespace);
        let Credential::User { uid, gid, .. } = callers.credential(Caller { uid: UNTOLD, gid: UNTOLD, pid: 0 }) else {
            panic!("a user")
        };
        assert_eq!((uid, gid), (NOBODY, NOBODY));
    }
}
