//! Regions that a server could not have written, and descriptors that are gone.

use proptest::prelude::*;
use rustix::fs::fstat;
use rustix::io::pwrite;

use super::*;

/// A copy of the region of a volume with a few nodes, as a killed server left it.
fn left_behind() -> (Rig, Arc<Region>) {
    let rig = Rig::limited(1 << 20);
    let files: Vec<_> = (0..4).map(|n| File::create(rig.at(&format!("file-{n}"))).expect("a file")).collect();
    std::fs::read_dir(rig.at("")).expect("a directory").for_each(drop);
    rig.kill();
    let copy = copy_of(&rig.region);
    // When the files are closed, the kernel needs a server that answers.
    rig.succeed();
    drop(files);
    (rig, copy)
}

/// Another region with the same content.
fn copy_of(region: &Region) -> Arc<Region> {
    let length = fstat(region.as_fd()).expect("attributes").st_size as usize;
    let mut bytes = vec![0; length];
    rustix::io::pread(region.as_fd(), &mut bytes[..], 0).expect("read");
    region_of(&bytes)
}

fn region_of(bytes: &[u8]) -> Arc<Region> {
    let region = Region::create(VolumeKind::Passthrough).expect("a region");
    let file = region.as_fd().try_clone_to_owned().expect("a descriptor");
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes.len() as u64).expect("memory");
    pwrite(&file, bytes, 0).expect("written");
    Arc::new(Region::adopt(file).expect("a region"))
}

/// Loads the volume of `region` as if no process had any of its descriptors.
fn load_alone(
    region: &Arc<Region>,
    source: Option<OwnedFd>,
    options: &PassthroughOptions,
) -> Result<LoadedVolume, TakeoverError> {
    // No descriptor of this process may be taken for one that was inherited.
    forget_descriptors(region, &descriptors(region).expect("read"));
    load(Arc::clone(region), None, source, own_table(), options.clone(), Arc::default())
}

#[test]
fn a_successor_without_descriptors_reports_no_losses() {
    let (rig, region) = left_behind();
    let source = File::open(&rig.source).expect("a directory");
    let loaded = load_alone(&region, Some(source.into()), &rig.options).expect("loaded");
    assert_eq!(loaded.losses(), inherit::LostObjects::default());
}

#[test]
fn a_volume_without_its_source_is_refused_and_left_as_it_was() {
    let (rig, region) = left_behind();
    let cells = region.cells().tagged().count();
    let refused = load_alone(&region, None, &rig.options);
    assert!(matches!(refused, Err(TakeoverError::NoSource)));
    let other = File::open("/").expect("a directory");
    let refused = load_alone(&region, Some(other.into()), &rig.options);
    assert!(matches!(refused, Err(TakeoverError::OtherSource)));
    let empty = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
    assert!(matches!(load_alone(&empty, None, &PassthroughOptions::default()), Err(TakeoverError::NotServed)));
    let projection = Arc::new(Region::create(VolumeKind::Projection).expect("a region"));
    assert!(matches!(load_alone(&projection, None, &PassthroughOptions::default()), Err(TakeoverError::OtherKind)));
    assert_eq!(region.cells().tagged().count(), cells, "nothing was erased");
}

#[test]
fn cells_of_any_content_are_harmless() {
    let (rig, region) = left_behind();
    let length = fstat(region.as_fd()).expect("attributes").st_size as usize;
    let mut bytes = vec![0; length];
    rustix::io::pread(region.as_fd(), &mut bytes[..], 0).expect("read");
    let cells = crate::region::cells_begin();
    let random = prop::collection::vec((cells..length, any::<u8>()), 1..2000);
    proptest!(ProptestConfig::with_cases(64), |(changes in random, tag in 0_u8..6)| {
        let mut bytes = bytes.clone();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        // Sets valid tags, so that the parser reads the rest of each cell.
        (cells..length).step_by(128).for_each(|at| bytes[at] = if bytes[at] == 0 { tag } else { bytes[at] });
        let source = File::open(&rig.source).expect("a directory");
        let region = region_of(&bytes);
        let numbers = descriptors(&region).expect("read");
        prop_assert!(numbers.is_sorted() && numbers.first().is_none_or(|first| *first >= state::FIRST_DESCRIPTOR));
        let _ = load_alone(&region, Some(source.into()), &rig.options);
    });
}

/// `cargo test --release -p podfs-fuse --lib -- --ignored --nocapture fifty_thousand`
#[test]
#[ignore = "it measures"]
fn fifty_thousand_nodes_are_read() {
    let rig = Rig::unlimited();
    for n in 0..50_000 {
        File::create(rig.source.join(format!("file-{n}"))).expect("a file");
    }
    for n in 0..50_000 {
        std::fs::metadata(rig.at(&format!("file-{n}"))).expect("the kernel knows it");
    }
    rig.kill();
    let region = copy_of(&rig.region);
    for _ in 0..5 {
        let source = File::open(&rig.source).expect("a directory");
        let began = std::time::Instant::now();
        let region = Region::adopt(region.as_fd().try_clone_to_owned().expect("a descriptor")).expect("a region");
        let loaded = load_alone(&Arc::new(region), Some(source.into()), &rig.options);
        let took = began.elapsed();
        println!("read in {took:?}, {:?}", loaded.expect("loaded").losses());
    }
}
