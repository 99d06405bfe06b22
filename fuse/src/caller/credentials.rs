//! The user and groups of a call to another machine.
//!
//! The kernel reports the user, the group and the thread of a caller. Its supplementary groups are in `/proc/<thread>/status`,
//! which podfs opens once for each thread and reads again after `REREAD_INTERVAL`: an open file belongs to one thread, and read(2)
//! fails after the thread has ended. podfs notices a change of the user or group at once, because the kernel reports both.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lru::LruCache;
use podfs_nfs::rpc::Credential;
use podfs_nfs::rpc::credential::MAX_GROUPS;
use serde::{Deserialize, Serialize};

use super::Caller;
use super::status::{self, ThreadStatus};

/// The most threads in the cache.
const CACHED: NonZeroUsize = NonZeroUsize::new(128).expect("it is not zero");
/// How long the cached groups of a thread are valid, if its user and group have not changed.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);

/// The user of calls to a source on another machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActAs {
    /// The caller's ids, as the kernel sends them.
    #[default]
    #[serde(rename = "AsTheyAre")]
    Caller,
    /// No user: AUTH_NONE (`sec=none`).
    #[serde(rename = "AsNobody")]
    Nobody,
    /// The ids of the caller in its own user namespace: ID-mapped mounts that map the ids of that namespace show the volume.
    #[serde(rename = "AsInTheirNamespace")]
    CallerInItsNamespace,
}

/// The cached credentials of callers.
pub struct Credentials {
    act_as: ActAs,
    known: RefCell<LruCache<u32, Thread>>,
    /// The ids of the pod, after its first request.
    pod: Cell<Option<Ids>>,
}

struct Thread {
    status: File,
    uid: u32,
    gid: u32,
    credential: Credential,
    at: Instant,
}

impl Credentials {
    /// An empty cache. `act_as` says which user calls have.
    pub fn new(act_as: ActAs) -> Self {
        Self { act_as, known: RefCell::new(LruCache::new(CACHED)), pod: Cell::new(None) }
    }

    /// The credential of a call for `caller`. If podfs cannot read the caller's status, it has only the group that the
    /// kernel sent.
    pub fn of(&self, caller: Caller) -> Credential {
        if self.act_as == ActAs::Nobody {
            return Credential::Anonymous;
        }
        let plain = || Credential::User {
            uid: or_overflow_id(caller.uid),
            gid: or_overflow_id(caller.gid),
            groups: Vec::new(),
        };
        if caller.pid == 0 {
            return plain();
        }
        let mut known = self.known.borrow_mut();
        if let Some(thread) = known.get_mut(&caller.pid) {
            // Requests from an ID-mapped mount have no user, so podfs could not notice a change of user.
            let same = (thread.uid, thread.gid) == (caller.uid, caller.gid) && self.act_as == ActAs::Caller;
            if same && thread.at.elapsed() < REREAD_INTERVAL {
                return thread.credential.clone();
            }
            if let Ok(status) = ThreadStatus::read(&thread.status) {
                (thread.uid, thread.gid, thread.at) = (caller.uid, caller.gid, Instant::now());
                thread.credential = self.credential(&status, caller);
                return thread.credential.clone();
            }
            // The thread has ended; another one may have its id.
            known.pop(&caller.pid);
        }
        let Some(file) = status::open(caller.pid) else { return plain() };
        let Ok(status) = ThreadStatus::read(&file) else { return plain() };
        let credential = self.credential(&status, caller);
        let Caller { uid, gid, .. } = caller;
        let thread = Thread { status: file, uid, gid, credential: credential.clone(), at: Instant::now() };
        known.put(caller.pid, thread);
        credential
    }

    fn credential(&self, status: &ThreadStatus, caller: Caller) -> Credential {
        let groups = status.numbers("Groups").take(MAX_GROUPS).collect();
        match self.act_as {
            ActAs::Nobody => Credential::Anonymous,
            ActAs::Caller => Credential::User { uid: caller.uid, gid: caller.gid, groups },
            ActAs::CallerInItsNamespace => {
                let ids = self.ids(caller.pid);
                // The fourth id is that for files (`fsuid`).
                let own = |name| ids.inside(status.numbers(name).nth(3).unwrap_or(OVERFLOW_ID));
                // In a request that creates a file, the kernel sends the id that the mount maps for the caller.
                let pick = |sent: u32, in_namespace: u32| if sent == UNSENT { in_namespace } else { sent };
                Credential::User {
                    uid: pick(caller.uid, own("Uid")),
                    gid: pick(caller.gid, own("Gid")),
                    groups: groups.into_iter().map(|group| ids.inside(group)).collect(),
                }
            }
        }
    }

    /// The ids that the mount maps for a caller. A process of a pod may make a user namespace and be root there; that is not the
    /// namespace of the mount, so podfs does not use it.
    fn ids(&self, pid: u32) -> Ids {
        let map = |pid: &str| fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap_or_default();
        let (callers_map, own_map) = (map(&pid.to_string()), map("self"));
        if callers_map == own_map {
            return Ids::All;
        }
        if let Some(ids) = Ids::of_pod(&callers_map) {
            self.pod.set(Some(ids));
        }
        self.pod.get().unwrap_or(Ids::None)
    }
}

/// The id of a request in which the kernel does not send the real one: from an ID-mapped mount, or from the kernel itself.
pub(crate) const UNSENT: u32 = u32::MAX;
/// The kernel's id for users and groups without a mapping (`overflowuid`).
const OVERFLOW_ID: u32 = 65534;
/// The kubelet maps a multiple of this number of ids for a pod. The first id of the host is a multiple of it, too (KEP-127).
const POD_IDS: u32 = 1 << 16;

/// The ids of the host that a user namespace maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ids {
    /// All: the caller is in this process's user namespace.
    All,
    /// The first id of the host, and the number of ids. In the namespace, they begin at 0.
    Pod(u32, u32),
    /// The mapping is unknown.
    None,
}

impl Ids {
    /// The ids of a pod's namespace; `None` if `map` is not the `uid_map` of a pod. An unprivileged process cannot write such a
    /// map: it may map only one id (user_namespaces(7)). A privileged process of the pod is root in the pod already.
    fn of_pod(map: &str) -> Option<Self> {
        let mut numbers = map.split_whitespace().map(str::parse::<u32>);
        let (inside, outside, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let is_one = inside == 0 && count > 0 && outside % POD_IDS == 0 && count % POD_IDS == 0;
        (is_one && numbers.next().is_none()).then_some(Self::Pod(outside, count))
    }

    fn inside(self, id: u32) -> u32 {
        match self {
            Self::All => id,
            Self::Pod(first, count) => id.checked_sub(first).filter(|inside| *inside < count).unwrap_or(OVERFLOW_ID),
            Self::None => OVERFLOW_ID,
        }
    }
}

fn or_overflow_id(id: u32) -> u32 {
    if id == UNSENT { OVERFLOW_ID } else { id }
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
        let credentials = Credentials::new(ActAs::Caller);
        for _ in 0..2 {
            let Credential::User { uid: 0, gid: 0, mut groups } = credentials.of(this_thread()) else {
                panic!("a user")
            };
            let mut own = own.clone();
            groups.sort_unstable();
            own.sort_unstable();
            assert_eq!(groups, own);
        }
    }

    #[test]
    fn a_caller_without_proc_has_no_groups() {
        let credentials = Credentials::new(ActAs::Caller);
        for pid in [0, u32::MAX >> 1] {
            let credential = credentials.of(Caller { uid: 7, gid: 8, pid });
            assert_eq!(credential, Credential::User { uid: 7, gid: 8, groups: Vec::new() });
        }
    }

    #[test]
    fn ids_of_a_pod_are_mapped_and_others_are_nobodys() {
        let ids = Ids::of_pod("         0     131072      65536\n").expect("of a pod");
        assert_eq!(
            [131_072, 132_071, 5, 0, 196_608].map(|id| ids.inside(id)),
            [0, 999, OVERFLOW_ID, OVERFLOW_ID, OVERFLOW_ID]
        );
        assert_eq!(Ids::None.inside(0), OVERFLOW_ID);
    }

    #[test]
    fn root_of_a_namespace_of_its_own_is_nobody() {
        for map in ["0 132071 1", "0 131072 1\n1 131073 65535", "5 131072 65536", "0 131072 1000", "", "0 1", "x y z"] {
            assert_eq!(Ids::of_pod(map), None, "{map}");
        }
        let credentials = Credentials::new(ActAs::CallerInItsNamespace);
        let Credential::User { uid, gid, .. } = credentials.of(Caller { uid: UNSENT, gid: UNSENT, pid: 0 }) else {
            panic!("a user")
        };
        assert_eq!((uid, gid), (OVERFLOW_ID, OVERFLOW_ID));
    }
}
