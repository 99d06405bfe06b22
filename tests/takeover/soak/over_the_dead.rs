//! The test kills the supervisor and the server at once, sometimes also the keeper, again and again. A container to which
//! mounts of the host propagate sees each new mount.

use std::fs;

use crate::common::namespace::{Container, Propagation, change_mount, mount_tmpfs};
use crate::common::*;
use nix::mount::{MntFlags, MsFlags, umount2};

#[test]
fn a_container_sees_each_new_mount_over_the_dead_one() {
    let fixture = Fixture::new(&config_pod());
    let change = |number: u64| fixture.write("objects/app.json", &config_map("app", &[("a", &number.to_string())]));
    let root = fixture.path("root");
    fs::create_dir(&root).expect("a directory");
    mount_tmpfs(&root);
    change_mount(&root, MsFlags::MS_SHARED | MsFlags::MS_REC);
    change(0);
    let mut running = fixture.run();
    let config = running.volume("config");
    let container = Container::new(Propagation::FromHost);
    let read = || {
        let path = config.join("a");
        container.run(move || fs::read_to_string(path).map_err(|error| error.kind()))
    };
    assert_eq!(read(), Ok("0".to_owned()));
    for round in 1..=load::rounds_or(20) {
        if round % 2 == 0 {
            // In these rounds the test also kills the keeper.
            load::faults::kill_all(running.keepers());
        }
        fixture.kill_both(&mut running);
        // statfs(2) always needs a server. The kernel could answer a read from its cache.
        let volume = config.clone();
        container.run(move || assert!(rustix::fs::statvfs(&volume).is_err(), "no server answers"));
        change(round);
        running = fixture.run();
        assert_eq!(read(), Ok(round.to_string()));
        assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), round.to_string());
    }
    assert!(running.stop().success());
    let mounts = container.run(move || podfs_fuse::mount::table::mounts().expect("a table"));
    let remains = mounts.iter().any(|mount| mount.at.starts_with(&config));
    assert!(!remains, "the container still has a mount of the volume");
    umount2(&root, MntFlags::MNT_DETACH).expect("the root directory is free");
}
