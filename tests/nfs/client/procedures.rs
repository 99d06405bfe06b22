//! Every procedure has its effect on the exported directory.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use podfs_nfs::rpc::Slice;
use podfs_nfs::v3::{
    AttributeChanges, Creation, FileType, NfsStatus, SpecialFile, Stability, Time, TimeChange, access,
};
use rustix::io::Errno;

use crate::client::{as_root, export, run};
use crate::nfs_rig::Ganesha;

#[test]
fn files_are_made_written_read_and_removed() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        export.null(as_root()).await.expect("an answer");
        let root = export.root();
        let changes = AttributeChanges { mode: Some(0o640), ..AttributeChanges::default() };
        let created = export.create(as_root(), &root, b"file", &Creation::Guarded(changes)).await.expect("created");
        let file = created.handle.expect("ganesha sends handles");
        let on_server = server.exported().join("file");
        assert_eq!(fs::metadata(&on_server).expect("it exists").permissions().mode() & 0o7777, 0o640);

        let data: Slice = (0..1_000_003_u32).map(|at| (at % 251) as u8).collect::<Vec<_>>().into();
        let written = export.write(as_root(), &file, 5, &data, Stability::Unstable).await.expect("written");
        assert_eq!(written.count as usize, data.len());
        let committed = export.commit(as_root(), &file, 0, 0).await.expect("committed");
        assert_eq!(committed.verifier, written.verifier);
        let content = fs::read(&on_server).expect("it exists");
        assert!(content[..5] == [0; 5] && content[5..] == *data);

        let read = export.read(as_root(), &file, 5, export.limits().read).await.expect("read");
        assert!(*read.data == *data && read.is_end);
        let some = export.read(as_root(), &file, 1_000_000, 7).await.expect("read");
        assert!(*some.data == content[1_000_000..1_000_007] && !some.is_end);
        let none = export.read(as_root(), &file, 2_000_000, 7).await.expect("read");
        assert!(none.data.is_empty() && none.is_end);

        let attributes = export.getattr(as_root(), &file).await.expect("attributes");
        let metadata = fs::metadata(&on_server).expect("it exists");
        assert_eq!(
            (attributes.kind, attributes.size, attributes.fileid, attributes.links, attributes.mode & 0o7777),
            (FileType::File, metadata.size(), metadata.ino(), 1, 0o640)
        );
        export.remove(as_root(), &root, b"file").await.expect("removed");
        assert!(!on_server.exists());
        let error = export.getattr(as_root(), &file).await.expect_err("it is gone");
        assert_eq!((error.status(), error.errno()), (Some(NfsStatus::STALE), Errno::STALE));
    });
}

#[test]
fn attributes_are_changed_and_times_reach_to_2106() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        let root = export.root();
        let none = AttributeChanges::default();
        let file = export.create(as_root(), &root, b"file", &Creation::Unchecked(none)).await.expect("created");
        let file = file.handle.expect("ganesha sends handles");
        let late = Time { seconds: 4_000_000_000, nanoseconds: 5 };
        let changes = AttributeChanges {
            mode: Some(0o4711),
            uid: Some(1234),
            gid: Some(2345),
            size: Some(9 << 30),
            atime: TimeChange::ServerTime,
            mtime: TimeChange::To(late),
        };
        let reply = export.setattr(as_root(), &file, &changes, None).await.expect("changed");
        let metadata = fs::metadata(server.exported().join("file")).expect("it exists");
        assert_eq!((metadata.uid(), metadata.gid(), metadata.size()), (1234, 2345, 9 << 30));
        assert_eq!(metadata.mtime(), 4_000_000_000);
        let after = reply.after.expect("ganesha sends attributes");
        assert_eq!((after.mtime, after.size), (late, 9 << 30));

        let guard = Time { seconds: 1, nanoseconds: 0 };
        let guarded = export.setattr(as_root(), &file, &none, Some(guard)).await.expect_err("the ctime differs");
        assert_eq!(guarded.status(), Some(NfsStatus::NOT_SYNC));
        let beyond = export.read(as_root(), &file, (9 << 30) - 1, 10).await.expect("read");
        assert!(*beyond.data == [0] && beyond.is_end);
    });
}

#[test]
fn directories_links_and_nodes_are_made_moved_and_removed() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        let (root, none) = (export.root(), AttributeChanges::default());
        let on_server = |name: &str| server.exported().join(name);
        let directory = export.mkdir(as_root(), &root, b"dir", &none).await.expect("created");
        let directory = directory.handle.expect("ganesha sends handles");
        assert!(on_server("dir").is_dir());

        export.symlink(as_root(), &root, b"symlink", b"dir/\xff", &none).await.expect("created");
        let link = export.lookup(as_root(), &root, b"symlink").await.expect("found");
        assert_eq!(link.attributes.expect("ganesha sends attributes").kind, FileType::Symlink);
        assert_eq!(&*export.readlink(as_root(), &link.handle).await.expect("read").target, b"dir/\xff");

        for (name, device) in [
            ("pipe", SpecialFile::Pipe),
            ("socket", SpecialFile::Socket),
            ("char", SpecialFile::Character(1, 3)),
            ("block", SpecialFile::Block(7, 9)),
        ] {
            export.mknod(as_root(), &root, name.as_bytes(), device, &none).await.expect("created");
            let kind = fs::metadata(on_server(name)).expect("it exists").file_type();
            let is_same_kind = match device {
                SpecialFile::Pipe => kind.is_fifo(),
                SpecialFile::Socket => kind.is_socket(),
                SpecialFile::Character(..) => kind.is_char_device(),
                SpecialFile::Block(..) => kind.is_block_device(),
            };
            assert!(is_same_kind, "{name}");
        }
        let device = export.lookup(as_root(), &root, b"block").await.expect("found").attributes.expect("attributes");
        assert_eq!(device.device, (7, 9));

        let file = export.create(as_root(), &directory, b"a", &Creation::Exclusive([7; 8])).await.expect("created");
        let file = file.handle.expect("ganesha sends handles");
        let again =
            export.create(as_root(), &directory, b"a", &Creation::Exclusive([7; 8])).await.expect("the same file");
        assert_eq!(again.handle, Some(file));
        let creation = Creation::Exclusive([8; 8]);
        let error = export.create(as_root(), &directory, b"a", &creation).await.expect_err("another verifier");
        assert_eq!(error.status(), Some(NfsStatus::EXIST));
        assert!(!error.is_retransmitted());
        export.link(as_root(), &file, &root, b"b").await.expect("linked");
        assert_eq!(fs::metadata(on_server("b")).expect("it exists").nlink(), 2);
        export.rename(as_root(), (&root, b"b"), (&directory, b"c")).await.expect("moved");
        assert!(on_server("dir/c").exists() && !on_server("b").exists());

        assert_eq!(export.rmdir(as_root(), &root, b"dir").await.expect_err("it is not empty").errno(), Errno::NOTEMPTY);
        for name in [b"a", b"c"] {
            export.remove(as_root(), &directory, name).await.expect("removed");
        }
        export.rmdir(as_root(), &root, b"dir").await.expect("removed");
        assert!(!on_server("dir").exists());
    });
}

#[test]
fn names_may_be_any_bytes_and_are_refused_when_too_long() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        let (root, creation) = (export.root(), Creation::Unchecked(AttributeChanges::default()));
        let (longest, too_long) = ([b'x'; 255], [b'x'; 256]);
        for name in [&b"\xff\xfe"[..], &longest] {
            export.create(as_root(), &root, name, &creation).await.expect("created");
            export.lookup(as_root(), &root, name).await.expect("found");
        }
        let error = export.create(as_root(), &root, &too_long, &creation).await.expect_err("too long");
        assert_eq!(error.errno(), Errno::NAMETOOLONG);
        assert_eq!(export.lookup(as_root(), &root, b"missing").await.expect_err("missing").errno(), Errno::NOENT);
    });
}

#[test]
fn a_large_directory_is_listed_page_by_page_with_every_name_once() {
    let server = Ganesha::start();
    for index in 0..2000 {
        fs::write(server.exported().join(format!("a file with quite a long name {index}")), "").expect("written");
    }
    run(async {
        let export = export(&server).await;
        for plus in [false, true] {
            let (mut cookie, mut verifier, mut pages) = (0, [0; 8], 0);
            let mut names = Vec::new();
            loop {
                let page = if plus {
                    export.readdirplus(as_root(), &export.root(), cookie, verifier).await.expect("listed")
                } else {
                    export.readdir(as_root(), &export.root(), cookie, verifier).await.expect("listed")
                };
                for entry in page.entries() {
                    cookie = entry.cookie;
                    if ![&b"."[..], b".."].contains(&entry.name) {
                        assert_eq!(entry.handle.is_some() && entry.attributes.is_some(), plus);
                        names.push(entry.name.to_vec());
                    }
                }
                verifier = page.verifier;
                pages += 1;
                if page.is_last {
                    break;
                }
            }
            assert!((2..12).contains(&pages), "{pages} pages");
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), 2000);
        }
    });
}

#[test]
fn the_server_reports_its_limits() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        let root = export.root();
        assert_eq!((export.limits().read, export.limits().write), (1 << 20, 1 << 20));
        assert!(export.limits().listing > 60 << 10, "ganesha prefers short pages, but sends long ones");
        let stat = export.fsstat(as_root(), &root).await.expect("statistics");
        assert!(stat.total_bytes >= stat.free_bytes && stat.free_bytes >= stat.available_bytes && stat.total_files > 0);
        assert!(export.pathconf(as_root(), &root).await.expect("limits").name_max >= 255);
        let wanted = access::READ | access::LOOKUP | access::MODIFY;
        assert_eq!(export.access(as_root(), &root, wanted).await.expect("permissions").granted, wanted);
    });
}
