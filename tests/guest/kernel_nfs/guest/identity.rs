//! Identities: the NFS server decides about the permissions of a caller, as for every other client.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use super::{DIRECTORY, Emptied, ExportedWith, assert_stops_clean, exported, fixture, version_3, volume_path};
use crate::common::caller::Caller;

#[test]
#[ignore = "runs in the guest"]
fn root_squash_leaves_the_ids_of_other_users() {
    let _squashed = ExportedWith::options("root_squash");
    for (path, options) in [("/", "nfsvers=4.1".to_owned()), ("/export", version_3())] {
        let _emptied = Emptied(DIRECTORY);
        let private = exported("private");
        fs::write(&private, "secret").expect("written");
        chown(&private, Some(1000), Some(1000)).expect("given");
        fs::set_permissions(&private, PermissionsExt::from_mode(0o600)).expect("a mode");
        let of_group = exported("of-group");
        fs::write(&of_group, "shared").expect("written");
        chown(&of_group, Some(1), Some(3000)).expect("given");
        fs::set_permissions(&of_group, PermissionsExt::from_mode(0o640)).expect("a mode");

        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = volume_path(&running);
        let read = |name: &str| fs::read_to_string(name).map_err(|error| error.raw_os_error());
        let [owner, member] = [Caller::new(1000), Caller::with_groups(1000, &[3000])];
        assert_eq!(owner.run(&volume, || read("private")), Ok("secret".to_owned()), "{options}");
        assert_eq!(fs::read(volume.join("private")).map_err(|error| error.raw_os_error()), Err(Some(libc::EACCES)));
        assert_eq!(member.run(&volume, || read("of-group")), Ok("shared".to_owned()), "{options}");
        assert_eq!(owner.run(&volume, || read("of-group")), Err(Some(libc::EACCES)), "{options}");
        owner.run(&volume, || fs::write("new", "mine").expect("written"));
        let created = fs::metadata(exported("new")).expect("there");
        assert_eq!((created.uid(), created.gid()), (1000, 1000), "{options}");
        assert_stops_clean(running, &fixture);
    }
}
