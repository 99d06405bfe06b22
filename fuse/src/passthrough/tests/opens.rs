//! Files whose opens a server has made and not answered when it was killed.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

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
    // It knows which cells the dead server has used.
    let region = Region::adopt(rig.region.as_fd().try_clone_to_owned().expect("a descriptor")).expect("a region");
    let region = Arc::new(region);
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
