use std::time::Duration;

use k8s_openapi::api::core::v1::NFSVolumeSource;
use podfs_nfs::ExportAddress;

use super::Nfs;
use super::options::{
    Backend, LocalLocks, LookupCache, NfsOptions, NfsVersion, RetryPolicy, Security, TransportSecurity,
};

fn parse(options: &str) -> NfsOptions {
    NfsOptions::parse([options]).unwrap_or_else(|error| panic!("{options}: {error}"))
}

fn refused(options: &str) -> String {
    NfsOptions::parse([options]).expect_err(options).to_string()
}

#[test]
fn a_server_and_an_absolute_path_are_needed() {
    let source = |server: &str, path: &str| {
        let source = NFSVolumeSource { server: server.to_owned(), path: path.to_owned(), read_only: None };
        Nfs::parse(&source).map_err(|error| error.to_string())
    };
    let found = source("nfs.example", "/srv").expect("a source");
    let address = ExportAddress::parse("nfs.example", "/srv").expect("an address");
    assert_eq!(found, Nfs { address, read_only: false });
    assert_eq!(source("[fd00::1]", "/").expect("NF-02").address.server, "fd00::1");
    assert_eq!(source("fd00::1", "/").expect("NF-02").address.server, "fd00::1");
    for (server, path) in [("", "/"), ("a", ""), ("a", "srv"), ("a b", "/"), ("a,b", "/"), ("[]", "/"), ("a", "/\0")] {
        source(server, path).expect_err(&format!("{server:?} {path:?}"));
    }
}

#[test]
fn without_options_the_defaults_are_those_of_linux() {
    let options = parse("");
    assert_eq!(options, NfsOptions::default());
    assert_eq!(
        (options.retry_policy, options.timeout, options.retransmissions),
        (RetryPolicy::Hard, Duration::from_secs(60), 2)
    );
}

#[test]
fn options_are_honoured() {
    assert_eq!(parse("nfsvers=3").version, Some(NfsVersion::V3));
    assert_eq!(parse("vers=4.1").version, Some(NfsVersion::V4(Some(1))));
    assert_eq!(parse("v4.2").version, Some(NfsVersion::V4(Some(2))));
    assert_eq!(parse("nfsvers=4,minorversion=1").version, Some(NfsVersion::V4(Some(1))));
    assert_eq!(parse("minorversion=1").version, Some(NfsVersion::V4(Some(1))));
    let soft = parse("softerr,timeo=50,retrans=3");
    assert_eq!(
        (soft.retry_policy, soft.timeout, soft.retransmissions),
        (RetryPolicy::SoftErr, Duration::from_secs(5), 3)
    );
    assert_eq!(parse("soft").retry_policy, RetryPolicy::Soft);
    assert_eq!((parse("port=20490,mountport=20491").port, parse("port=0").port), (Some(20490), None));
    assert_eq!(parse("mountport=20491").mount_port, Some(20491));
    assert_eq!(parse("rsize=1048576,wsize=70000").wsize, Some(69632));
    assert_eq!((parse("rsize=1").rsize, parse("rsize=99999999").rsize), (Some(4096), Some(1 << 20)));
    assert_eq!((parse("nconnect=16").connections, parse("noresvport").reserved_port), (16, false));
    assert_eq!(parse("nolock").local_locks, LocalLocks { flock: true, posix: true });
    assert_eq!(parse("local_lock=flock").local_locks, LocalLocks { flock: true, posix: false });
    assert_eq!(parse("local_lock=posix").local_locks, LocalLocks { flock: false, posix: true });
    assert_eq!(parse("local_lock=none").local_locks, parse("lock").local_locks);
    let cache = parse("acregmin=1,acregmax=2,acdirmin=4,acdirmax=3").attributes;
    assert_eq!((cache.file_min, cache.file_max), (Duration::from_secs(1), Duration::from_secs(2)));
    assert_eq!((cache.directory_min, cache.directory_max), (Duration::from_secs(4), Duration::from_secs(4)));
    assert_eq!(parse("actimeo=9").attributes.directory_min, Duration::from_secs(9));
    assert!(parse("noac").sync && parse("noac").attributes.file_max.is_zero());
    assert_eq!(
        (parse("lookupcache=pos").lookup_cache, parse("lookupcache=none").lookup_cache),
        (LookupCache::Positive, LookupCache::None)
    );
    assert!(!parse("nocto").close_to_open && !parse("nordirplus").readdirplus && !parse("rdirplus=none").readdirplus);
    assert!(parse("sync").sync && parse("dirsync").sync && parse("ro").read_only && parse("noexec").no_exec);
    assert!(parse("nosuid").no_suid && parse("nodev").no_dev);
    assert_eq!(parse("context=system_u:object_r:t:s0").selinux_context.as_deref(), Some("system_u:object_r:t:s0"));
    let quoted = parse(r#"ro,context="system_u:object_r:t:s0:c1,c2",soft"#);
    assert_eq!(quoted.selinux_context.as_deref(), Some("system_u:object_r:t:s0:c1,c2"));
    assert!(quoted.read_only && quoted.retry_policy == RetryPolicy::Soft);
    assert_eq!(parse("sec=none").security, Security::None);
    assert_eq!(parse("sec=krb5p").security, Security::Flavors("krb5p".to_owned()));
    assert_eq!(parse("sec=sys:krb5").security, Security::Flavors("sys:krb5".to_owned()));
    assert_eq!(parse("xprtsec=mtls").transport_security, TransportSecurity::MutualTls);
    assert_eq!(parse("podfs.backend=kernel").backend, Some(Backend::Kernel));
    assert_eq!(parse("podfs.backend=auto").backend, None);
}

#[test]
fn common_options_are_accepted() {
    for options in [
        "hard,nfsvers=4.1",
        "noatime,nodiratime,relatime,tcp,proto=tcp",
        "bg,intr,fg",
        "nosharecache,fsc,_netdev",
        "x-systemd.automount,x-anything=1",
        "rdirplus,noacl",
        "retry=2,namlen=255",
        "mountproto=tcp,mountvers=3",
        "defaults,rw,async,suid,dev,exec,softreval",
    ] {
        parse(options);
    }
}

#[test]
fn the_kernel_gets_all_options_except_those_of_podfs() {
    let options = NfsOptions::parse(["nfsvers=4.1,ro,noatime", "podfs.backend=kernel", "x-mine=2", "hard", "hard"]);
    let options = options.expect("options");
    assert_eq!(options.words, ["nfsvers=4.1", "hard"]);
    assert!(options.read_only);
}

#[test]
fn unsupported_options_are_refused_by_name() {
    for option in [
        "wombat",
        "wombat=1",
        "udp",
        "proto=udp",
        "proto=rdma",
        "rdma",
        "mountvers=1",
        "nfsvers=2",
        "nfsvers=5",
        "port=65536",
        "timeo=0",
        "timeo=x",
        "retrans=-1",
        "nconnect=0",
        "nconnect=17",
        "rsize=0",
        "local_lock=some",
        "lookupcache=no",
        "xprtsec=ssl",
        "sec=",
        "addr=10.0.0.1",
        "podfs.backend=fuse",
        "podfs.wombat=1",
        "actimeo=-1",
        "rdirplus=1",
        "minorversion=3",
        "hard=1",
        "mountproto=udp",
    ] {
        let error = refused(option);
        assert!(error.contains(&format!("{option:?}")), "{option}: {error}");
    }
}

#[test]
fn options_that_contradict_each_other_are_refused_and_both_are_named() {
    for (one, other) in [
        ("hard", "soft"),
        ("ro", "rw"),
        ("nfsvers=3", "vers=4"),
        ("nolock", "local_lock=flock"),
        ("sync", "async"),
        ("timeo=1", "timeo=2"),
        ("nfsvers=3", "minorversion=1"),
        ("tcp", "proto=udp"),
        ("cto", "nocto"),
    ] {
        let error = refused(&format!("{one},{other}"));
        assert!(error.contains(&format!("{one:?}")) && error.contains(&format!("{other:?}")), "{error}");
    }
    parse("hard,hard,nfsvers=3,vers=3,v3,nolock,local_lock=all,tcp,proto=tcp");
}

#[test]
fn nf_08_without_a_version_podfs_uses_nfs_3_with_its_own_client() {
    for options in ["", "nolock", "hard,timeo=50,proto=tcp"] {
        let options = parse(options);
        assert_eq!(options.choose_backend(None, true), Ok(Backend::User), "podfs's own client has NFS 3 alone");
        assert_eq!(options.choose_backend(None, true), parse("nfsvers=3").choose_backend(None, true));
    }
}

#[test]
fn the_options_choose_the_nfs_client() {
    let choose = |options: &str, wish, has| parse(options).choose_backend(wish, has);
    let (kernel, user) = (Some(Backend::Kernel), Some(Backend::User));
    for has in [true, false] {
        assert_eq!(choose("", None, has), Ok(Backend::User));
        assert_eq!(choose("nfsvers=3", None, has), Ok(Backend::User));
        assert_eq!(choose("podfs.backend=kernel", user, has), Ok(Backend::User), "the pod decides");
        for options in ["nfsvers=4.1", "sec=krb5", "xprtsec=tls"] {
            let error = choose(options, user, has).expect_err(options).to_string();
            assert!(error.contains(options), "{error}");
        }
    }
    for options in ["nfsvers=4", "nfsvers=4.2", "sec=krb5p", "sec=sys:krb5", "xprtsec=mtls"] {
        assert_eq!(choose(options, None, true), Ok(Backend::Kernel));
        choose(options, None, false).expect_err("the kernel has no client");
    }
    assert_eq!(choose("nfsvers=3", kernel, true), Ok(Backend::Kernel));
    choose("nfsvers=3", kernel, false).expect_err("the kernel has no client");
}
