//! `tests/xfstests`: the script that runs xfstests on a volume of podfs. Here, a small program replaces xfstests: it mounts and
//! unmounts the file system as xfstests does before, between and after its tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::*;

const XFSTESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/xfstests");
const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/xfstests.md");

/// A program that mounts, finds, unmounts and remounts the file system as xfstests does, and prints its arguments.
const CHECK: &str = r#"#!/usr/bin/env bash
set -euo pipefail
. "$HOST_OPTIONS"
mount_test() { mount -t "$FSTYP$FUSE_SUBTYP" "$@" "$TEST_DEV" "$TEST_DIR"; }
is_there() {
  [ "$(findmnt -rncv -S "$1" -o SOURCE,TARGET)" = "$1 $2" ]
  [ "$(df -T -P | awk -v dev="$1" '$1 == dev { print $2, $7 }')" = "fuse $2" ]
  [ "$(df -T -P "$2" | awk 'NR == 2 { print $1, $2 }')" = "$1 fuse" ]
  mount | grep -q "^$1 on $2 type fuse "
}
mount_test
is_there "$TEST_DEV" "$TEST_DIR"
[ -z "$(findmnt -rncv -S "$SCRATCH_DEV" -o SOURCE,TARGET)" ]
mount -t "$FSTYP$FUSE_SUBTYP" "$SCRATCH_DEV" "$SCRATCH_MNT"
is_there "$SCRATCH_DEV" "$SCRATCH_MNT"
is_there "$TEST_DEV" "$TEST_DIR"
# Other users reach both places.
install -d -m 777 "$TEST_DIR/open" "$SCRATCH_MNT/open"
setpriv --reuid=65534 --regid=65534 --clear-groups touch "$TEST_DIR/open/file" "$SCRATCH_MNT/open/file"
[ ! -e "$TEST_DIR/scratch" ]
umount "$SCRATCH_DEV"
[ ! -e "$SCRATCH_MNT/open" ]
umount "$TEST_DEV"
mount_test -o nosuid,nodev,noexec,noatime
options=",$(findmnt -rn -M "$TEST_DIR" -o OPTIONS),"
for option in nosuid nodev noexec noatime; do [ "${options#*,$option,}" != "$options" ]; done
umount "$TEST_DEV"
mount_test
echo content >"$TEST_DIR/file"
for _ in 1 2 3; do
  umount "$TEST_DEV"
  [ ! -e "$TEST_DIR/file" ]
  mount_test -o rw
done
mount -o remount,ro "$TEST_DEV" "$TEST_DIR"
if touch "$TEST_DIR/other" 2>/dev/null; then exit 9; fi
umount "$TEST_DIR"
mount_test -o ro
if touch "$TEST_DIR/other" 2>/dev/null; then exit 9; fi
echo "found: $(cat "$TEST_DIR/file")"
[ "$1" = -E ] && echo "excluded:" $(cat "$2")
shift 2
echo "arguments: $*"
exit 3
"#;

/// Runs the script with a checkout of xfstests whose program `check` is this one.
fn run(fixture: &Fixture, volume: &[&str], check: &str, arguments: &[&str]) -> Output {
    let checkout = fixture.path("checkout");
    fs::create_dir_all(&checkout).expect("a directory");
    fs::write(checkout.join("check"), check).expect("written");
    fs::set_permissions(checkout.join("check"), fs::Permissions::from_mode(0o755)).expect("executable");
    fs::create_dir_all(fixture.path("tmp")).expect("a directory");
    let mut script = Command::new(XFSTESTS);
    script.args(volume).arg(&checkout).args(arguments).env("PODFS", PODFS).env("TMPDIR", fixture.path("tmp"));
    fixture.mark(&mut script).output().expect("the script ran")
}

#[track_caller]
fn assert_nothing_left(fixture: &Fixture) {
    let files: Vec<PathBuf> =
        fs::read_dir(fixture.path("tmp")).expect("a listing").flatten().map(|entry| entry.path()).collect();
    assert_eq!(files, Vec::<PathBuf>::new());
    assert_eq!(fixture.processes(), []);
    assert_eq!(fixture.mounts(), Vec::<PathBuf>::new());
    assert!(!Path::new("/sbin/mount.fuse.podfs").exists(), "the script does not install its mount helper on the host");
}

#[test]
fn the_suite_finds_two_volumes_that_it_can_mount_and_unmount_and_nothing_is_left() {
    let results = fs::read_to_string(RESULTS).expect("the results");
    let rows = results.lines().filter_map(|line| line.strip_prefix("| generic/"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split(" | ").collect()).collect();
    for (column, volume) in [(1, &[][..]), (1, &["--volume", "hostPath"]), (2, &["--volume", "emptyDir"])] {
        let fixture = Fixture::new("");
        let output = run(&fixture, volume, CHECK, &["-g", "quick"]);
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(3), "{volume:?}: {text}{errors}");
        let failing = rows.iter().filter(|row| row[column] == "fails").map(|row| format!("generic/{}", row[0]));
        let failing: Vec<_> = failing.collect();
        assert_eq!(failing.contains(&"generic/478".to_owned()), column == 1, "{failing:?}");
        let expected = format!("found: content\nexcluded: {}\narguments: -g quick\n", failing.join(" "));
        assert_eq!(text, expected, "{volume:?}: {errors}");
        assert_nothing_left(&fixture);
    }
}

#[test]
fn a_suite_that_leaves_the_volume_mounted_or_is_killed_leaves_nothing() {
    for end in ["exit 0", "kill -KILL $$"] {
        let fixture = Fixture::new("");
        let check = format!(
            "#!/usr/bin/env bash\n. \"$HOST_OPTIONS\"\nmount -t fuse.podfs \"$TEST_DEV\" \"$TEST_DIR\"\n\
             touch \"$TEST_DIR/file\"\n{end}\n"
        );
        let output = run(&fixture, &[], &check, &[]);
        assert_eq!(output.status.success(), end == "exit 0", "{output:?}");
        assert_nothing_left(&fixture);
    }
}

#[test]
fn a_directory_that_is_no_checkout_is_refused_in_one_sentence() {
    let fixture = Fixture::new("");
    let mut script = Command::new(XFSTESTS);
    let output = script.arg(fixture.path("")).env("PODFS", PODFS).output().expect("the script ran");
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.ends_with("is no checkout of xfstests: it has no program check\n"), "{errors}");
    let output = run(&fixture, &["--volume", "secret"], CHECK, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && errors.contains("secret is no kind of volume"), "{errors}");
}

#[test]
fn the_script_is_clean() {
    let output = Command::new("shellcheck").arg(XFSTESTS).output().expect("shellcheck");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
