use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;

use super::*;
use crate::region::golden::{self, golden};

const DIRECTORIES: DirectoryAttributes = DirectoryAttributes { mode: 0o755, gid: 0 };

fn entry<'a>(path: &'a str, content: &'a [u8]) -> FileEntry<'a> {
    FileEntry { path, content, mode: 0o644, uid: 0, gid: 0 }
}

fn image(entries: &[(&str, &[u8])]) -> Image {
    layout(entries).image().expect("an image")
}

fn layout<'a>(entries: &[(&'a str, &'a [u8])]) -> ImageLayout<'a> {
    let entries = entries.iter().map(|(path, content)| entry(path, content));
    ImageLayout::new(entries, DIRECTORIES).expect("a tree")
}

fn refusal(entries: &[(&str, &[u8])]) -> Option<ImageError> {
    let entries = entries.iter().map(|(path, content)| entry(path, content));
    ImageLayout::new(entries, DIRECTORIES).err()
}

fn find(image: &Image, path: &str) -> Option<Index> {
    path.split('/').try_fold(0, |directory, name| image.child(directory, name.as_bytes()))
}

fn content<'a>(image: &'a Image, path: &str) -> Option<&'a [u8]> {
    match image.node(find(image, path)?)?.kind {
        ImageNodeKind::File { content } => Some(image.served(content)),
        ImageNodeKind::Directory { .. } => None,
    }
}

#[test]
fn every_file_is_found_with_its_bytes() {
    // AW-23: binary, empty and large values are exact.
    let large = vec![7; 1 << 20];
    let image = image(&[("a", b"1"), ("sub/b", b"\0\xff"), ("sub/deep/c", &large), ("empty", b"")]);
    assert_eq!(content(&image, "a"), Some(&b"1"[..]));
    assert_eq!(content(&image, "sub/b"), Some(&b"\0\xff"[..]));
    assert_eq!(content(&image, "sub/deep/c"), Some(&large[..]));
    assert_eq!(content(&image, "empty"), Some(&b""[..]));
    assert_eq!(content(&image, "absent"), None);
    assert_eq!(image.path(find(&image, "sub/deep/c").expect("it is there")), "sub/deep/c");
    assert_eq!(image.top_level().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "empty", "sub"]);
}

#[test]
fn an_empty_payload_has_an_image_too() {
    // AW-15
    let image = image(&[]);
    assert_eq!(image.nodes(), 1);
    assert_eq!(image.node(0).expect("a root").kind, ImageNodeKind::Directory { children: 1..1, subdirectories: 0 });
}

#[test]
fn a_name_cannot_be_a_file_and_a_directory() {
    // AW-20, in either order
    let conflict = Some(ImageError::FileAndDirectory("a".to_owned()));
    assert_eq!(refusal(&[("a", b""), ("a/b", b"")]), conflict);
    assert_eq!(refusal(&[("a/b", b""), ("a", b"")]), conflict);
    assert_eq!(refusal(&[("a", b""), ("a", b"")]), Some(ImageError::Twice("a".to_owned())));
}

#[test]
fn an_element_that_no_directory_can_hold_is_refused() {
    for path in ["", "/a", "a//b", "a/", ".", "a/../b", "nul\0byte"] {
        assert!(matches!(refusal(&[(path, b"")]), Some(ImageError::Path(_))), "{path:?}");
    }
    let long = "x".repeat(256);
    assert!(matches!(refusal(&[(&long, b"")]), Some(ImageError::Path(_))));
}

#[test]
fn a_payload_equals_its_own_image_and_no_other() {
    let shown = image(&[("a", b"1"), ("b/c", b"2")]);
    assert!(layout(&[("b/c", b"2"), ("a", b"1")]).equals(&shown), "order does not matter");
    assert!(!layout(&[("a", b"1"), ("b/c", b"3")]).equals(&shown), "content");
    assert!(!layout(&[("a", b"12"), ("b/c", b"")]).equals(&shown), "where one file ends");
    assert!(!layout(&[("a", b"1"), ("b/d", b"2")]).equals(&shown), "name");
    assert!(!layout(&[("a", b"1")]).equals(&shown), "removal");
    let mode = FileEntry { mode: 0o600, ..entry("a", b"1") };
    let other = ImageLayout::new([mode, entry("b/c", b"2")], DIRECTORIES).expect("a tree");
    assert!(!other.equals(&shown), "mode");
}

#[test]
fn a_server_that_writes_into_an_image_changes_nothing_that_was_checked() {
    let entries: &[(&str, &[u8])] = &[("a", b"1"), ("b/c", b"22")];
    let (shown, payload) = (image(entries), layout(entries));
    let descriptor = shown.as_fd().try_clone_to_owned().expect("a descriptor");
    let adopted = Image::adopt(descriptor).expect("an image");
    shown.disown();
    let start = adopted.content.start;
    let write = |at: usize, bytes: &[u8]| rustix::io::pwrite(&shown, bytes, at as u64).expect("written");
    write(0, &vec![0xff; start]);
    for read in [&shown, &adopted] {
        assert_eq!(read.path(find(read, "b/c").expect("it is there")), "b/c");
        assert_eq!(read.top_level().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b"]);
        assert!(payload.equals(read));
    }
    write(start, b"9");
    assert!(!payload.equals(&shown) && !payload.equals(&adopted));
    let file = |image: &Image| match image.node(find(image, "a").expect("a file")).expect("a node").kind {
        ImageNodeKind::File { content } => content,
        ImageNodeKind::Directory { .. } => panic!("it is a file"),
    };
    assert_eq!(**shown.copied(file(&shown)).expect("a copy"), *b"9");
    assert!(shown.has_bytes(file(&shown), b"9") && !shown.has_bytes(file(&shown), b"1"));
}

#[test]
fn content_is_compared_part_by_part() {
    let large: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
    let entries: &[(&str, &[u8])] = &[("a", b""), ("b", &large), ("c", b"1"), ("d", &large)];
    let shown = image(entries);
    assert!(layout(entries).equals(&shown));
    for at in [0, 65_535, 65_536, 199_999] {
        let mut changed = large.clone();
        changed[at] ^= 1;
        assert!(!layout(&[("a", b""), ("b", &changed), ("c", b"1"), ("d", &large)]).equals(&shown), "{at}");
        assert!(!layout(&[("a", b""), ("b", &large), ("c", b"1"), ("d", &changed)]).equals(&shown), "{at}");
    }
}

#[test]
fn a_longer_image_than_any_payload_takes_no_memory() {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("long", flags).expect("a file");
    rustix::fs::ftruncate(&file, (256 << 20) + 8).expect("a length");
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).expect("sealed");
    assert_eq!(Image::adopt(file).err().expect("refused").to_string(), "the memory file is too long");
}

#[test]
fn a_damaged_image_is_refused_and_never_a_panic() {
    let whole = image(&[("a", b"1"), ("b/c", b"22"), ("b/d", b"333")]);
    let bytes = whole.block.served().to_vec();
    let index_end = bytes.len() - usize::try_from(whole.content_size()).expect("a size");
    for position in 0..index_end {
        for value in [0, 1, 0x7f, 0xff] {
            let mut damaged = bytes.clone();
            damaged[position] = value;
            let block = Block::new(&[&damaged], whole.nodes() as usize).expect("a block");
            let adopted = Image::read(block).and_then(|image| image.check().map(|()| image));
            if let Ok(image) = adopted {
                for index in 0..image.nodes() {
                    let _ = (image.node(index), image.path(index));
                }
                let _ = image.child(0, b"a");
            }
        }
    }
    // The bytes end at a multiple of eight.
    for length in (0..bytes.len()).step_by(8) {
        let Ok(block) = Block::new(&[&bytes[..length]], whole.nodes() as usize) else {
            continue;
        };
        assert!(Image::read(block).is_err(), "cut to {length} bytes");
    }
}

proptest! {
    #[test]
    fn an_image_has_the_files_of_its_payload(files in proptest::collection::btree_map("[a-c]{1,2}(/[d-f]{1,2}){0,2}", proptest::collection::vec(any::<u8>(), 0..20), 0..20)) {
        // Paths of depth 1 to 3 over disjoint alphabets conflict only when one is a prefix of another.
        let entries: Vec<_> = files.iter().map(|(path, content)| (path.as_str(), content.as_slice())).collect();
        let conflict = files.keys().any(|a| files.keys().any(|b| b.starts_with(&format!("{a}/"))));
        prop_assert_eq!(refusal(&entries).is_some(), conflict);
        if !conflict {
            let image = image(&entries);
            for (path, bytes) in &files {
                prop_assert_eq!(content(&image, path), Some(bytes.as_slice()));
            }
            let shown = (0..image.nodes()).filter(|index| matches!(image.node(*index).expect("a node").kind, ImageNodeKind::File { .. })).count();
            prop_assert_eq!(shown, files.len());
        }
    }
}

#[test]
fn an_image_has_the_bytes_that_other_versions_read() {
    let entries = [FileEntry { uid: 3, gid: 4, mode: 0o640, ..entry("a", b"1") }, entry("sub/b", b"\0\xff")];
    let made = ImageLayout::new(entries, DirectoryAttributes { mode: 0o2755, gid: 5 }).expect("a tree");
    let made = made.image().expect("an image");
    made.lookups().iter().zip(6..).for_each(|(count, value)| count.store(value, Relaxed));
    let (recorded, bytes) = (golden!("image.bin"), golden::content(&made));
    golden::assert_golden("image.bin", recorded, &bytes);
    let adopted = Image::adopt(golden::memory_file(recorded, bytes.len())).expect("today's program reads it");
    assert_eq!((content(&adopted, "a"), content(&adopted, "sub/b")), (Some(&b"1"[..]), Some(&b"\0\xff"[..])));
    assert_eq!(adopted.lookups().iter().map(|count| count.load(Relaxed)).collect::<Vec<_>>(), [6, 7, 8, 9]);
    // The last byte of the first word is the version.
    let sentence = golden::refused_with(recorded, (4, u32::from_le_bytes(*b"s\0\0\x02")), bytes.len(), Image::adopt);
    assert!(sentence.contains("image has version 2, which another version of podfs made"), "{sentence}");
}
