//! Supervisor and server are killed at once, also with the keeper, again and again: a container that follows the host's mounts
//! sees the new ones.

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
    for round in 1..=crate::soak::rounds(20) {
        if round % 2 == 0 {
            // All three at once.
            crate::soak::kill_all(running.keepers());
        }
        fixture.kill_both(&mut running);
        // statfs(2) needs a server; a read might be answered from the kernel's cache.
        let asked = config.clone();
        container.run(move || assert!(rustix::fs::statvfs(&asked).is_err(), "no server answers"));
        change(round);
        running = fixture.run();
        assert_eq!(read(), Ok(round.to_string()));
        assert_eq!(fs::read_to_string(config.join("a")).expect("a file"), round.to_string());
    }
    assert!(running.stop().success());
    let left = container.run(move || podfs_fuse::mount::table::mounts().expect("a table"));
    assert!(left.iter().all(|mounted| !mounted.at.starts_with(&config)), "something is left in the container");
    umount2(&root, MntFlags::MNT_DETACH).expect("the root directory is free");
}
