//! The parser of mount options: the known options, their meanings, and the contradictions among them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{
    AttributeCache, Backend, LocalLocks, LookupCache, NfsOptions, NfsOptionsError, NfsVersion, OptionProblem,
    RetryPolicy, Security, TransportSecurity,
};
use crate::types::{has_open_quote, mount_options};

/// Options of mount(8) that no NFS client has, and that have no effect here: podfs always does what they say, or a pod's
/// volume has nothing that they could change.
const OF_MOUNT: [&str; 18] = [
    "defaults",
    "rw",
    "noatime",
    "atime",
    "nodiratime",
    "diratime",
    "relatime",
    "norelatime",
    "strictatime",
    "suid",
    "dev",
    "exec",
    "_netdev",
    "auto",
    "noauto",
    "nofail",
    "nouser",
    "silent",
];

/// Options of nfs(5) that change nothing where podfs's own client is used.
const OF_KERNEL: [&str; 22] = [
    "async",
    "lazytime",
    "acl",
    "noacl",
    "bg",
    "fg",
    "intr",
    "nointr",
    "sharecache",
    "nosharecache",
    "fsc",
    "nofsc",
    "trunkdiscovery",
    "notrunkdiscovery",
    "migration",
    "nomigration",
    "posix",
    "softreval",
    "nosoftreval",
    "nodirsync",
    "lock",
    "tcp",
];

/// Options with a value that only the kernel's client knows.
const VALUES_OF_KERNEL: [&str; 7] = ["namlen", "bsize", "fsc", "max_connect", "retry", "clientaddr", "mountvers"];

/// The topic of an option. Options that set one topic differently contradict each other.
fn topic(name: &str) -> &str {
    match name {
        "nfsvers" | "vers" | "v3" | "v4" | "v4.0" | "v4.1" | "v4.2" => "vers",
        "hard" | "soft" | "softerr" => "hard",
        "ro" | "rw" => "ro",
        "sync" | "async" => "sync",
        "resvport" | "noresvport" => "resvport",
        "lock" | "nolock" | "local_lock" => "lock",
        "ac" | "noac" => "ac",
        "cto" | "nocto" => "cto",
        "rdirplus" | "nordirplus" => "rdirplus",
        "suid" | "nosuid" => "suid",
        "dev" | "nodev" => "dev",
        "exec" | "noexec" => "exec",
        "tcp" | "udp" | "rdma" | "proto" => "proto",
        other => other,
    }
}

/// The meaning of an option. Options of one topic with equal meanings do not contradict each other.
fn meaning(word: &str) -> &str {
    match word {
        "tcp" => "proto=tcp",
        "nolock" => "local_lock=all",
        "lock" => "local_lock=none",
        word => word.strip_prefix("nfsvers=").or(word.strip_prefix("vers=")).or(word.strip_prefix('v')).unwrap_or(word),
    }
}

/// Parses the options.
pub(super) fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<NfsOptions, NfsOptionsError> {
    let mut parser = Parser::default();
    for word in options.into_iter().flat_map(mount_options).filter(|word| !word.is_empty()) {
        parser.take(word)?;
    }
    parser.finish()
}

#[derive(Default)]
struct Parser {
    options: NfsOptions,
    /// The option that set each topic.
    word_by_topic: BTreeMap<String, String>,
    /// `minorversion`.
    minor_version: Option<u8>,
    /// `noac`: the kernel caches no attributes.
    no_attribute_cache: bool,
}

impl Parser {
    fn take(&mut self, word: &str) -> Result<(), NfsOptionsError> {
        if has_open_quote(word) {
            return Err(NfsOptionsError::Option { word: word.to_owned(), problem: OptionProblem::OpenQuote });
        }
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        match self.word_by_topic.get(topic(name)) {
            Some(earlier) if meaning(earlier) == meaning(word) => return Ok(()),
            Some(earlier) => {
                let (one, other) = (earlier.clone(), word.to_owned());
                return Err(NfsOptionsError::Contradiction { one, other });
            }
            None => drop(self.word_by_topic.insert(topic(name).to_owned(), word.to_owned())),
        }
        let result = match value {
            None => self.flag(name),
            Some(value) => self.value(name, value),
        };
        result.map_err(|problem| NfsOptionsError::Option { word: word.to_owned(), problem })?;
        let is_podfs = name.starts_with("podfs.") || ["ro", "nosuid", "nodev", "noexec", "context"].contains(&name);
        if !is_podfs && !is_of_mount(name) {
            self.options.words.push(word.to_owned());
        }
        Ok(())
    }

    fn flag(&mut self, name: &str) -> Result<(), OptionProblem> {
        let options = &mut self.options;
        match name {
            "hard" => options.retry_policy = RetryPolicy::Hard,
            "soft" => options.retry_policy = RetryPolicy::Soft,
            "softerr" => options.retry_policy = RetryPolicy::SoftErr,
            "ro" => options.read_only = true,
            "sync" | "dirsync" => options.sync = true,
            "nosuid" => options.no_suid = true,
            "nodev" => options.no_dev = true,
            "noexec" => options.no_exec = true,
            "resvport" => options.reserved_port = true,
            "noresvport" => options.reserved_port = false,
            "nolock" => options.local_locks = LocalLocks { flock: true, posix: true },
            "ac" => {}
            "noac" => (self.no_attribute_cache, options.sync) = (true, true),
            "cto" => {}
            "nocto" => options.close_to_open = false,
            "rdirplus" => {}
            "nordirplus" => options.readdirplus = false,
            "udp" | "rdma" => return Err(OptionProblem::Transport),
            "v3" | "v4" | "v4.0" | "v4.1" | "v4.2" => options.version = Some(version(&name[1..])?),
            name if OF_KERNEL.contains(&name) || is_of_mount(name) => {}
            _ => return Err(OptionProblem::Unknown),
        }
        Ok(())
    }

    fn value(&mut self, name: &str, value: &str) -> Result<(), OptionProblem> {
        let options = &mut self.options;
        let cache = &mut options.attributes;
        match name {
            "nfsvers" | "vers" => options.version = Some(version(value)?),
            "minorversion" => self.minor_version = Some(number(value, 0, 2)? as u8),
            "proto" | "mountproto" => match value {
                "tcp" | "tcp6" => {}
                _ => return Err(OptionProblem::Transport),
            },
            "mountvers" if value != "3" => {
                return Err(OptionProblem::MountVersion);
            }
            "port" => options.port = Some(port(value)?).filter(|port| *port != 0),
            "mountport" => options.mount_port = Some(port(value)?).filter(|port| *port != 0),
            "mounthost" | "mountaddr" => options.mount_host = Some(value.to_owned()),
            "timeo" => options.timeout = Duration::from_millis(100 * u64::from(number(value, 1, 60_000)?)),
            "retrans" => options.retransmissions = number(value, 0, 1000)?,
            "rsize" => options.rsize = Some(transfer(value)?),
            "wsize" => options.wsize = Some(transfer(value)?),
            "nconnect" => options.connections = number(value, 1, 16)? as u8,
            "local_lock" => {
                let (flock, posix) = match value {
                    "all" => (true, true),
                    "flock" => (true, false),
                    "posix" => (false, true),
                    "none" => (false, false),
                    _ => return Err(OptionProblem::Value("all, flock, posix or none")),
                };
                options.local_locks = LocalLocks { flock, posix };
            }
            "actimeo" => {
                let time = seconds(value)?;
                *cache = AttributeCache { file_min: time, file_max: time, directory_min: time, directory_max: time };
            }
            "acregmin" => cache.file_min = seconds(value)?,
            "acregmax" => cache.file_max = seconds(value)?,
            "acdirmin" => cache.directory_min = seconds(value)?,
            "acdirmax" => cache.directory_max = seconds(value)?,
            "lookupcache" => {
                options.lookup_cache = match value {
                    "all" => LookupCache::All,
                    "pos" | "positive" => LookupCache::Positive,
                    "none" => LookupCache::None,
                    _ => return Err(OptionProblem::Value("all, positive or none")),
                }
            }
            "rdirplus" => match value {
                "none" => options.readdirplus = false,
                "force" => {}
                _ => return Err(OptionProblem::Value("none or force")),
            },
            "sec" => {
                options.security = match value {
                    "sys" => Security::Sys,
                    "none" | "null" => Security::None,
                    "" => return Err(OptionProblem::NoFlavour),
                    flavors => Security::Flavors(flavors.to_owned()),
                }
            }
            "xprtsec" => {
                options.transport_security = match value {
                    "none" => TransportSecurity::None,
                    "tls" => TransportSecurity::Tls,
                    "mtls" => TransportSecurity::MutualTls,
                    _ => return Err(OptionProblem::Value("none, tls or mtls")),
                }
            }
            "context" => options.selinux_context = Some(value.trim_matches('"').to_owned()),
            "addr" => return Err(OptionProblem::Address),
            "podfs.backend" => {
                options.backend = Backend::parse(value).map_err(|_| OptionProblem::Value("auto, kernel or user"))?
            }
            name if VALUES_OF_KERNEL.contains(&name) || is_of_mount(name) => {}
            _ => return Err(OptionProblem::Unknown),
        }
        Ok(())
    }

    fn finish(self) -> Result<NfsOptions, NfsOptionsError> {
        let Parser { mut options, minor_version, no_attribute_cache, word_by_topic } = self;
        match (options.version, minor_version) {
            (Some(NfsVersion::V4(None)) | None, Some(minor)) => options.version = Some(NfsVersion::V4(Some(minor))),
            (Some(version), Some(minor)) if version != NfsVersion::V4(Some(minor)) => {
                let word = |topic: &str| word_by_topic.get(topic).cloned().unwrap_or_default();
                let (one, other) = (word("vers"), word("minorversion"));
                return Err(NfsOptionsError::Contradiction { one, other });
            }
            _ => {}
        }
        if no_attribute_cache {
            let none = Duration::ZERO;
            options.attributes =
                AttributeCache { file_min: none, file_max: none, directory_min: none, directory_max: none };
        }
        let cache = &mut options.attributes;
        cache.file_max = cache.file_max.max(cache.file_min);
        cache.directory_max = cache.directory_max.max(cache.directory_min);
        Ok(options)
    }
}

fn is_of_mount(name: &str) -> bool {
    OF_MOUNT.contains(&name) || name == "comment" || name.starts_with("x-") || name.starts_with("X-")
}

fn version(value: &str) -> Result<NfsVersion, OptionProblem> {
    match value {
        "3" => Ok(NfsVersion::V3),
        "4" => Ok(NfsVersion::V4(None)),
        "4.0" => Ok(NfsVersion::V4(Some(0))),
        "4.1" => Ok(NfsVersion::V4(Some(1))),
        "4.2" => Ok(NfsVersion::V4(Some(2))),
        _ => Err(OptionProblem::Version),
    }
}

fn number(value: &str, least: u32, most: u32) -> Result<u32, OptionProblem> {
    let number = value.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or(OptionProblem::Range { least, most })
}

fn port(value: &str) -> Result<u16, OptionProblem> {
    value.parse().map_err(|_| OptionProblem::Value("a port, 0 to 65535"))
}

fn seconds(value: &str) -> Result<Duration, OptionProblem> {
    Ok(Duration::from_secs(number(value, 0, 86_400)?.into()))
}

/// Parses `rsize` or `wsize`. Like Linux, it rounds down to a multiple of 1 KiB, and keeps the value within 4 KiB and 1 MiB.
fn transfer(value: &str) -> Result<u32, OptionProblem> {
    let bytes = number(value, 1, u32::MAX)?;
    Ok((bytes & !1023).clamp(4096, 1 << 20))
}
