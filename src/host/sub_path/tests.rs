//! The rows "prepare directory" and "bind" of the kubelet's inventory (4.2), and races with a container that swaps
//! directories and links.

use std::cell::Cell;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tempfile::TempDir;

use super::*;

/// A directory with a volume in it and something outside.
fn base() -> TempDir {
    let base = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(base.path().join("volume/dir/inner")).expect("a directory");
    fs::write(base.path().join("volume/file"), "inside").expect("written");
    fs::create_dir(base.path().join("outside")).expect("a directory");
    fs::write(base.path().join("outside/file"), "secret").expect("written");
    base
}

fn try_open(base: &Path, path: &str, missing: IfMissing) -> Result<OwnedFd, String> {
    let root = File::open(base.join("volume")).expect("the volume");
    open(root.as_fd(), path, missing).map_err(|error| error.to_string())
}

fn opens(base: &TempDir, path: &str, missing: IfMissing, leads_to: &str) {
    let opened = try_open(base.path(), path, missing).expect(path);
    let (opened, there) =
        (fstat(&opened).expect("a status"), fs::metadata(base.path().join(leads_to)).expect(leads_to));
    assert_eq!((opened.st_dev, opened.st_ino), (there.dev(), there.ino()), "{path}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a status").mode() & 0o7777
}

#[test]
fn sp_01_directories_files_sockets_and_fifos_are_opened() {
    let base = base();
    let volume = base.path().join("volume");
    let _socket = UnixListener::bind(volume.join("socket")).expect("a socket");
    nix::unistd::mkfifo(&volume.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    for path in ["dir", "dir/inner", "dir//./inner/", ".", "file", "socket", "fifo"] {
        opens(&base, path, IfMissing::Make, &format!("volume/{path}"));
    }
}

#[test]
fn sp_02_missing_directories_have_the_mode_of_the_root() {
    for bits in [0o755, 0o700, 0o2770, 0o4755, 0o1777] {
        let base = base();
        let volume = base.path().join("volume");
        fs::set_permissions(&volume, Permissions::from_mode(bits)).expect("a mode");
        opens(&base, "new/deep/er", IfMissing::Make, "volume/new/deep/er");
        opens(&base, "dir/more", IfMissing::Make, "volume/dir/more");
        for made in ["new", "new/deep", "new/deep/er", "dir/more"] {
            assert_eq!(mode(&volume.join(made)), bits, "{made}");
        }
        assert_eq!(mode(&volume.join("dir")), 0o755, "it was there before");
    }
}

#[test]
fn sp_03_links_that_stay_inside_are_followed() {
    let base = base();
    let volume = base.path().join("volume");
    symlink("dir", volume.join("link")).expect("a link");
    symlink("../../file", volume.join("dir/inner/up")).expect("a link");
    opens(&base, "link", IfMissing::Refuse, "volume/dir");
    opens(&base, "link/inner", IfMissing::Refuse, "volume/dir/inner");
    opens(&base, "dir/inner/up", IfMissing::Refuse, "volume/file");
    opens(&base, "link/new", IfMissing::Make, "volume/dir/new");
}

#[test]
fn sp_03_paths_that_lead_outside_are_refused_and_nothing_is_made_there() {
    let base = base();
    let volume = base.path().join("volume");
    let outside = base.path().join("outside");
    symlink(&outside, volume.join("absolute")).expect("a link");
    symlink("../outside", volume.join("relative")).expect("a link");
    symlink("../../outside", volume.join("dir/middle")).expect("a link");
    symlink("../nowhere", volume.join("dangling-out")).expect("a link");
    symlink("nothing", volume.join("dangling")).expect("a link");
    symlink("loop", volume.join("loop")).expect("a link");
    symlink("/proc/self/root", volume.join("magic")).expect("a link");
    let leads_out = "leads out of the volume by a symbolic link; use a link that stays in it";
    let rows = [
        ("absolute", leads_out),
        ("absolute/file", leads_out),
        ("absolute/new", leads_out),
        ("relative", leads_out),
        ("relative/file", leads_out),
        ("relative/new", leads_out),
        ("dir/middle/file", leads_out),
        ("dir/middle/new/deep", leads_out),
        ("dangling-out", leads_out),
        ("dangling-out/new", leads_out),
        ("magic", leads_out),
        ("../outside", leads_out),
        ("dangling", "has a symbolic link that cannot be followed"),
        ("loop", "has a symbolic link that cannot be followed"),
        ("loop/new", "has a symbolic link that cannot be followed"),
        ("file/new", "leads through a file; only a directory has something in it"),
        ("file/new/deep", "leads through a file; only a directory has something in it"),
    ];
    for (path, reason) in rows {
        let refused = try_open(base.path(), path, IfMissing::Make).expect_err(path);
        assert_eq!(refused, format!("{path:?} {reason}"));
    }
    let long = "x".repeat(300);
    let refused = try_open(base.path(), &long, IfMissing::Make).expect_err("too long");
    assert!(refused.ends_with("is too long for the volume's file system"), "{refused}");
    let left: Vec<_> =
        fs::read_dir(&outside).expect("a listing").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(left, ["file"]);
    assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 2);
}

#[test]
fn sp_08_the_container_waits_for_a_missing_key_by_name() {
    let base = base();
    let refused = try_open(base.path(), "key", IfMissing::Refuse).expect_err("missing");
    assert_eq!(refused, "the volume has no \"key\" yet");
    assert!(!base.path().join("volume/key").exists());
}

/// Calls `look` for each number up to `looks`. Meanwhile, another thread swaps a directory and a link to the outside as
/// fast as it can.
fn while_swapped(base: &Path, looks: u32, look: impl Fn(u32)) {
    let volume = base.join("volume");
    symlink("../outside", volume.join("other")).expect("a link");
    fs::create_dir(volume.join("swapped")).expect("a directory");
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let directory = File::open(&volume).expect("the volume");
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            while !is_over.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(&directory, "swapped", &directory, "other", exchange).expect("swapped");
            }
        });
        let _end = End(&is_over);
        (0..looks).for_each(look);
    });
}

/// Ends the swaps, also when a look fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn sp_04_a_directory_that_is_swapped_with_a_link_leads_nowhere_else() {
    let base = base();
    let (swapped, outside) = (base.path(), fs::metadata(base.path().join("outside")).expect("a status").ino());
    let (opened, refused) = (Cell::new(0), Cell::new(0));
    while_swapped(base.path(), 100_000, |round| {
        let path = if round % 2 == 0 { "swapped".to_owned() } else { format!("swapped/made/{}", round % 64) };
        match try_open(swapped, &path, IfMissing::Make) {
            Ok(found) => {
                assert_ne!(fstat(&found).expect("a status").st_ino, outside);
                opened.set(opened.get() + 1);
            }
            Err(_) => refused.set(refused.get() + 1),
        }
    });
    let left: Vec<_> = fs::read_dir(base.path().join("outside")).expect("a listing").collect();
    assert_eq!(left.len(), 1, "nothing was made outside: {left:?}");
    assert!(opened.get() > 0 && refused.get() > 0, "there was no race: {opened:?} opened, {refused:?} refused");
}
