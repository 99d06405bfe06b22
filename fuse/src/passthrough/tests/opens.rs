//! Files whose opens a server has made and not answered when it was killed.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Instant;

use rustix::fs::OFlags;
use rustix::io::read;
use zerocopy::IntoBytes;

use super::super::state::{OpenCell, with_flags};
use super::outcomes::{ATTEMPTS, put};
use super::*;
use crate::region::cells::OwnedCell;
use crate::session::Request;

#[test]
fn files_whose_opens_are_in_flight_at_a_kill_can_be_mapped() {
    let mapped = std::iter::repeat_with(|| map_opened_at_a_kill(&Rig::new(PassthroughOptions::default())));
    mapped.take(ATTEMPTS).flatten().next().expect("the kernel knows the file once");
}

/// Kills the server while two files are opened, which it has made and not answered, and maps them. `None` if the kernel had forgotten
/// what it knew of the file, so that it sent another request.
fn map_opened_at_a_kill(rig: &Rig) -> Option<()> {
    put(rig, "file", "text");
    rig.kill();
    let device = rig.device();
    let open = |path: PathBuf| File::options().read(true).write(true).open(path);
    let callers = [rig.at("file"), rig.at("file")].map(|path| thread::spawn(move || open(path)));
    let region = adopted(rig);
    region.take_over();
    let used: Vec<_> = region.cells().tagged().map(|(cell, _)| cell).collect();
    region.cells().keep_only(&used);
    let mut input = vec![0_u64; 300_000];
    for handle in 1..=2 {
        let length = read(&device, input.as_mut_bytes()).ok()?;
        let request = Request::parse(&input.as_bytes()[..length]).expect("a request");
        if request.name() != "OPEN" {
            return None;
        }
        rig.region.in_flight().slot(handle as usize).take(request.number());
        let opened = OwnedCell::new(&region, |cell: &OpenCell| {
            cell.flags.store(with_flags(OFlags::RDWR), Relaxed);
            cell.handle.store(handle, Relaxed);
            cell.node.store(request.node.0, Relaxed);
            cell.unique.store(request.number(), Relaxed);
        });
        // The dead server has left it.
        let _left = ManuallyDrop::new(opened.expect("a cell"));
        rig.region.header().counters.last_handle.store(handle, Relaxed);
    }
    rig.succeed();
    for caller in callers {
        let file = caller.join().expect("no panic").expect("opened");
        // SAFETY: the mapping is not used.
        unsafe { memmap2::MmapMut::map_mut(&file) }.expect("mapped");
    }
    Some(())
}

#[test]
fn a_successor_knows_that_an_open_was_answered_without_a_backing_file() {
    let rig = Rig::unlimited();
    put(&rig, "file", "text");
    let open = || File::options().read(true).write(true).open(rig.at("file"));
    let node = {
        let _opened = open().expect("opened");
        open_cells(&rig).pop().expect("a cell").1
    };
    eventually("the file is released", || open_cells(&rig).is_empty());
    // A server that is killed while it releases the last open file leaves the cell of that file without a backing file.
    rig.kill();
    add_open_file(&rig, 1000, node, 7);
    rig.succeed();
    let first = open().expect("an open without a backing file");
    let (unique, _) = open_cells(&rig).into_iter().find(|(unique, _)| *unique != 7).expect("a cell");
    // A server that is killed just after an answer leaves the request in its slot. It has completed the release before.
    rig.kill();
    remove_open_file(&rig, 7);
    rig.region.in_flight().slot(5).take(unique);
    rig.succeed();
    let second = open().expect("the kernel takes no backing file beside an open file without one");
    drop((first, second));
}

/// The region as a successor has it, which knows the cells that the server has used.
fn adopted(rig: &Rig) -> Arc<Region> {
    let file = rig.region.as_fd().try_clone_to_owned().expect("a descriptor");
    Arc::new(Region::adopt(file).expect("a region"))
}

/// The requests and nodes of all open files.
fn open_cells(rig: &Rig) -> Vec<(u64, u64)> {
    let region = adopted(rig);
    let cells = region.cells();
    let open = cells.tagged().filter_map(|(id, _)| cells.find::<OpenCell>(id));
    open.map(|cell| (cell.unique.load(Relaxed), cell.node.load(Relaxed))).collect()
}

/// Adds the cell of an open file, as a dead server leaves it.
fn add_open_file(rig: &Rig, handle: u64, node: u64, unique: u64) {
    let region = adopted(rig);
    let used: Vec<_> = region.cells().tagged().map(|(cell, _)| cell).collect();
    region.cells().keep_only(&used);
    let opened = OwnedCell::new(&region, |cell: &OpenCell| {
        cell.flags.store(with_flags(OFlags::RDWR), Relaxed);
        cell.handle.store(handle, Relaxed);
        cell.node.store(node, Relaxed);
        cell.unique.store(unique, Relaxed);
    });
    rig.region.header().counters.last_handle.store(handle, Relaxed);
    let _left = ManuallyDrop::new(opened.expect("a cell"));
}

/// Removes the cell of the open file that this request opened.
fn remove_open_file(rig: &Rig, unique: u64) {
    let region = adopted(rig);
    let cells = region.cells();
    let is_of_request = |cell: &OpenCell| cell.unique.load(Relaxed) == unique;
    let open = cells.tagged().filter(|(id, _)| cells.find::<OpenCell>(*id).is_some_and(is_of_request));
    let open: Vec<_> = open.map(|(id, _)| id).collect();
    cells.erase(&open);
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "still not true: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
