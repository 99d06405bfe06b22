//! Messages are compared with those of another implementation, and invalid messages are refused.

mod values;

use std::rc::Rc;

use nfs3_types::nfs3 as theirs;
use nfs3_types::nfs3::Nfs3Option;
use nfs3_types::rpc;
use nfs3_types::xdr_codec::{List, Opaque};
use proptest::prelude::*;

use super::*;
use crate::rpc::message::{RecordKind, receive};
use crate::rpc::{Credential, Denial, Procedure, RpcCall, RpcError, Slice};
use crate::xdr::{Malformed, XdrReader, XdrWriter};
use values::*;

proptest! {
    #[test]
    fn calls_are_written_as_others_write_them(
        xid in any::<u32>(),
        credential in credential(),
        numbers in any::<[u32; 3]>(),
        file in handle(),
        offset in any::<u64>(),
        data in bytes(300),
    ) {
        let [program, version, number] = numbers;
        let procedure = Procedure { program, version, number };
        let payload = Slice::new(Rc::new(data.clone()));
        let arguments = |to: &mut XdrWriter| {
            super::arguments::write(to, &file, offset, data.len() as u32, Stability::DataSync);
        };
        let message = RpcCall::call_with(xid, procedure, &credential, arguments, Some(payload));
        let sent: Vec<u8> = message.parts(0).flat_map(|part| part.to_vec()).collect();

        let cred = match &credential {
            Credential::Anonymous => rpc::opaque_auth::default(),
            Credential::User { uid, gid, groups } => rpc::opaque_auth::auth_unix(&rpc::auth_unix {
                stamp: 0,
                machinename: Opaque::owned(b"podfs".to_vec()),
                uid: *uid,
                gid: *gid,
                gids: groups.iter().copied().take(16).collect(),
            }),
        };
        let body = rpc::msg_body::CALL(rpc::call_body {
            rpcvers: 2,
            prog: program,
            vers: version,
            proc: number,
            cred,
            verf: rpc::opaque_auth::default(),
        });
        let call = packed(&rpc::rpc_msg { xid, body });
        let write = packed(&theirs::WRITE3args {
            file: their_handle(&file),
            offset,
            count: data.len() as u32,
            stable: theirs::stable_how::DATA_SYNC,
            data: Opaque::borrowed(&data),
        });
        let mark = rpc::fragment_header::new((call.len() + write.len()) as u32, true).into_xdr_buf();
        prop_assert_eq!(&sent, &[&mark[..], &call, &write].concat());
        prop_assert_eq!(message.len(), sent.len());
        for skip in [1, 4, 50, sent.len() - 1] {
            let rest: Vec<u8> = message.parts(skip).flat_map(|part| part.to_vec()).collect();
            prop_assert_eq!(&rest, &sent[skip..]);
        }
    }

    #[test]
    fn arguments_are_written_as_others_write_them(
        (file, other) in (handle(), handle()),
        (name, second) in (bytes(255), bytes(255)),
        changes in changes(),
        guard in prop::option::of(time()),
        (wanted, count, major, minor) in any::<(u32, u32, u32, u32)>(),
        offset in any::<u64>(),
        verifier in any::<[u8; 8]>(),
    ) {
        use super::arguments as a;
        let (their_file, their_other) = (|| their_handle(&file), || their_handle(&other));
        let their_changes = || their_changes(&changes);
        prop_assert_eq!(
            ours(|to| a::setattr(to, &file, &changes, guard)),
            packed(&theirs::SETATTR3args {
                object: their_file(),
                new_attributes: their_changes(),
                guard: their_option(guard.map(their_time)),
            })
        );
        prop_assert_eq!(
            ours(|to| a::name(to, &file, &name)),
            packed(&theirs::LOOKUP3args { what: their_name(&file, &name) })
        );
        prop_assert_eq!(
            ours(|to| a::access(to, &file, wanted)),
            packed(&theirs::ACCESS3args { object: their_file(), access: wanted })
        );
        prop_assert_eq!(
            ours(|to| a::read(to, &file, offset, count)),
            packed(&theirs::READ3args { file: their_file(), offset, count })
        );
        prop_assert_eq!(
            ours(|to| a::commit(to, &file, offset, count)),
            packed(&theirs::COMMIT3args { file: their_file(), offset, count })
        );
        for (creation, how) in [
            (Creation::Unchecked(changes), theirs::createhow3::UNCHECKED(their_changes())),
            (Creation::Guarded(changes), theirs::createhow3::GUARDED(their_changes())),
            (Creation::Exclusive(verifier), theirs::createhow3::EXCLUSIVE(theirs::createverf3(verifier))),
        ] {
            prop_assert_eq!(
                ours(|to| a::create(to, &file, &name, &creation)),
                packed(&theirs::CREATE3args { where_: their_name(&file, &name), how })
            );
        }
        prop_assert_eq!(
            ours(|to| a::mkdir(to, &file, &name, &changes)),
            packed(&theirs::MKDIR3args { where_: their_name(&file, &name), attributes: their_changes() })
        );
        prop_assert_eq!(
            ours(|to| a::symlink(to, &file, &name, &second, &changes)),
            packed(&theirs::SYMLINK3args {
                where_: their_name(&file, &name),
                symlink: theirs::symlinkdata3 {
                    symlink_attributes: their_changes(),
                    symlink_data: second.as_slice().into(),
                },
            })
        );
        let device = || theirs::devicedata3 {
            dev_attributes: their_changes(),
            spec: theirs::specdata3 { specdata1: major, specdata2: minor },
        };
        for (node, what) in [
            (SpecialFile::Block(major, minor), theirs::mknoddata3::NF3BLK(device())),
            (SpecialFile::Character(major, minor), theirs::mknoddata3::NF3CHR(device())),
            (SpecialFile::Socket, theirs::mknoddata3::NF3SOCK(their_changes())),
            (SpecialFile::Pipe, theirs::mknoddata3::NF3FIFO(their_changes())),
        ] {
            prop_assert_eq!(
                ours(|to| a::mknod(to, &file, &name, node, &changes)),
                packed(&theirs::MKNOD3args { where_: their_name(&file, &name), what })
            );
        }
        prop_assert_eq!(
            ours(|to| a::rename(to, (&file, &name), (&other, &second))),
            packed(&theirs::RENAME3args { from: their_name(&file, &name), to: their_name(&other, &second) })
        );
        prop_assert_eq!(
            ours(|to| a::link(to, &other, &file, &name)),
            packed(&theirs::LINK3args { file: their_other(), link: their_name(&file, &name) })
        );
        let cookieverf = theirs::cookieverf3(verifier);
        prop_assert_eq!(
            ours(|to| a::readdir(to, &file, offset, verifier, count)),
            packed(&theirs::READDIR3args { dir: their_file(), cookie: offset, cookieverf, count })
        );
        prop_assert_eq!(
            ours(|to| a::readdirplus(to, &file, offset, verifier, wanted, count)),
            packed(&theirs::READDIRPLUS3args {
                dir: their_file(),
                cookie: offset,
                cookieverf,
                dircount: wanted,
                maxcount: count,
            })
        );
    }

    #[test]
    fn attributes_are_read_as_others_write_them(known in attributes(), known_around in around()) {
        let bytes = packed(&their_attributes(&known));
        prop_assert_eq!(Attributes::read(&mut XdrReader::new(&bytes)), Ok(known));
        let bytes = packed(&their_around(&known_around));
        prop_assert_eq!(WccData::read(&mut XdrReader::new(&bytes)), Ok(known_around));
    }

    #[test]
    fn results_are_read_as_others_write_them(
        file in handle(),
        (first, second) in (prop::option::of(attributes()), prop::option::of(attributes())),
        (around, other_around) in (around(), around()),
        data in bytes(300),
        verifier in any::<[u8; 8]>(),
        [a, b, c, d, e, f, g] in any::<[u32; 7]>(),
        big in any::<[u64; 6]>(),
        flags in any::<[bool; 4]>(),
    ) {
        let (attributes, others) = (
            || their_option(first.as_ref().map(their_attributes)),
            || their_option(second.as_ref().map(their_attributes)),
        );

        let bytes = packed(&theirs::LOOKUP3resok {
            object: their_handle(&file),
            obj_attributes: attributes(),
            dir_attributes: others(),
        });
        let looked = results::lookup(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((looked.handle, looked.attributes, looked.directory), (file, first, second));

        let bytes = packed(&theirs::ACCESS3resok { obj_attributes: attributes(), access: a });
        let accessed = results::access(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((accessed.granted, accessed.attributes), (a, first));

        let path = data.as_slice().into();
        let bytes = packed(&theirs::READLINK3resok { symlink_attributes: attributes(), data: path });
        let link = results::readlink(&mut XdrReader::new(&bytes), cutting(&bytes)).expect("well-formed");
        prop_assert_eq!((&*link.target, link.attributes), (&data[..], first));

        let count = data.len() as u32;
        let opaque = Opaque::borrowed(&data);
        let bytes = packed(&theirs::READ3resok { file_attributes: attributes(), count, eof: flags[0], data: opaque });
        let read = results::read(&mut XdrReader::new(&bytes), count, cutting(&bytes)).expect("well-formed");
        prop_assert_eq!((&*read.data, read.is_end, read.attributes), (&data[..], flags[0], first));

        let bytes = packed(&theirs::WRITE3resok {
            file_wcc: their_around(&around),
            count: a,
            committed: theirs::stable_how::FILE_SYNC,
            verf: theirs::writeverf3(verifier),
        });
        let written = results::write(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((written.file, written.count, written.verifier), (around, a, verifier));
        prop_assert_eq!(written.stability, Stability::FileSync);

        let verf = theirs::writeverf3(verifier);
        let bytes = packed(&theirs::COMMIT3resok { file_wcc: their_around(&around), verf });
        let committed = results::commit(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((committed.file, committed.verifier), (around, verifier));

        let bytes = packed(&theirs::CREATE3resok {
            obj: their_option(flags[0].then(|| their_handle(&file))),
            obj_attributes: attributes(),
            dir_wcc: their_around(&around),
        });
        let created = results::created(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((created.handle, created.attributes), (flags[0].then_some(file), first));
        prop_assert_eq!(created.directory, around);

        let bytes = packed(&theirs::LINK3resok { file_attributes: attributes(), linkdir_wcc: their_around(&around) });
        let linked = results::link(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((linked.attributes, linked.directory), (first, around));

        let (fromdir_wcc, todir_wcc) = (their_around(&around), their_around(&other_around));
        let bytes = packed(&theirs::RENAME3resok { fromdir_wcc, todir_wcc });
        prop_assert_eq!(results::rename(&mut XdrReader::new(&bytes)), Ok((around, other_around)));

        let [tbytes, fbytes, abytes, tfiles, ffiles, afiles] = big;
        let obj_attributes = attributes();
        let bytes = packed(&theirs::FSSTAT3resok {
            obj_attributes, tbytes, fbytes, abytes, tfiles, ffiles, afiles, invarsec: a,
        });
        let stat = results::fsstat(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!([stat.total_bytes, stat.free_bytes, stat.available_bytes], [tbytes, fbytes, abytes]);
        prop_assert_eq!([stat.total_files, stat.free_files, stat.available_files], [tfiles, ffiles, afiles]);

        let step = Time { seconds: a, nanoseconds: b };
        let bytes = packed(&theirs::FSINFO3resok {
            obj_attributes: attributes(),
            rtmax: a, rtpref: b, rtmult: c, wtmax: d, wtpref: e, wtmult: f, dtpref: g,
            maxfilesize: big[0],
            time_delta: their_time(step),
            properties: c,
        });
        let info = results::fsinfo(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((info.read_max, info.write_max), (a, d));
        prop_assert_eq!((info.file_max, info.time_step), (big[0], step));
        prop_assert_eq!((info.properties, info.attributes), (c, first));

        let [no_trunc, chown_restricted, case_insensitive, case_preserving] = flags;
        let bytes = packed(&theirs::PATHCONF3resok {
            obj_attributes: attributes(),
            linkmax: a, name_max: b, no_trunc, chown_restricted, case_insensitive, case_preserving,
        });
        let conf = results::pathconf(&mut XdrReader::new(&bytes)).expect("well-formed");
        prop_assert_eq!((conf.links_max, conf.name_max), (a, b));
        prop_assert_eq!((conf.refuses_long_names, conf.restricts_chown), (no_trunc, chown_restricted));
    }

    #[test]
    fn listings_are_read_as_others_write_them(
        directory in prop::option::of(attributes()),
        verifier in any::<[u8; 8]>(),
        entries in prop::collection::vec(
            (any::<(u64, u64)>(), "[a-z]{1,20}", prop::option::of(attributes()), prop::option::of(handle())),
            0..10,
        ),
        eof in any::<bool>(),
    ) {
        let dir_attributes = || their_option(directory.as_ref().map(their_attributes));
        let cookieverf = theirs::cookieverf3(verifier);
        let plus = entries.iter().map(|((fileid, cookie), name, attributes, handle)| theirs::entryplus3 {
            fileid: *fileid,
            name: name.as_bytes().into(),
            cookie: *cookie,
            name_attributes: their_option(attributes.as_ref().map(their_attributes)),
            name_handle: their_option(handle.as_ref().map(their_handle)),
        });
        let reply = theirs::dirlistplus3 { entries: List(plus.collect()), eof };
        let bytes = packed(&theirs::READDIRPLUS3resok { dir_attributes: dir_attributes(), cookieverf, reply });
        let listing = DirectoryPage::read(&mut XdrReader::new(&bytes), true, cutting(&bytes)).expect("well-formed");
        let read: Vec<_> = listing
            .entries()
            .map(|entry| ((entry.fileid, entry.cookie), entry.name.to_vec(), entry.attributes, entry.handle))
            .collect();
        let known: Vec<_> = entries.iter().cloned().map(|entry| (entry.0, entry.1.into_bytes(), entry.2, entry.3)).collect();
        prop_assert_eq!(read, known);
        prop_assert_eq!((listing.directory, listing.verifier, listing.is_last), (directory, verifier, eof));

        let plain = entries.iter().map(|((fileid, cookie), name, ..)| theirs::entry3 {
            fileid: *fileid,
            name: name.as_bytes().into(),
            cookie: *cookie,
        });
        let reply = theirs::dirlist3 { entries: List(plain.collect()), eof };
        let bytes = packed(&theirs::READDIR3resok { dir_attributes: dir_attributes(), cookieverf, reply });
        let listing = DirectoryPage::read(&mut XdrReader::new(&bytes), false, cutting(&bytes)).expect("well-formed");
        let names: Vec<_> = listing.entries().map(|entry| entry.name.to_vec()).collect();
        prop_assert_eq!(names, entries.iter().map(|entry| entry.1.clone().into_bytes()).collect::<Vec<_>>());
    }

    #[test]
    fn any_bytes_are_results_or_refused(bytes in bytes(400)) {
        read_as_everything(&bytes);
    }

    #[test]
    fn changed_results_are_results_or_refused(
        file in handle(),
        known in attributes(),
        around in around(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in any::<prop::sample::Index>(),
    ) {
        let entry = theirs::entryplus3 {
            fileid: 1,
            name: b"name".as_slice().into(),
            cookie: 2,
            name_attributes: Nfs3Option::Some(their_attributes(&known)),
            name_handle: Nfs3Option::Some(their_handle(&file)),
        };
        let listing = packed(&theirs::READDIRPLUS3resok {
            dir_attributes: Nfs3Option::Some(their_attributes(&known)),
            cookieverf: theirs::cookieverf3::default(),
            reply: theirs::dirlistplus3 { entries: List(vec![entry]), eof: true },
        });
        let created = packed(&theirs::CREATE3resok {
            obj: Nfs3Option::Some(their_handle(&file)),
            obj_attributes: Nfs3Option::Some(their_attributes(&known)),
            dir_wcc: their_around(&around),
        });
        for mut bytes in [listing, created] {
            for (index, value) in &changes {
                let index = index.index(bytes.len());
                bytes[index] = *value;
            }
            read_as_everything(&bytes);
            read_as_everything(&bytes[..cut.index(bytes.len())]);
        }
    }
}

/// Decodes bytes as every type.
fn read_as_everything(bytes: &[u8]) {
    fn read<T>(bytes: &[u8], parse: impl FnOnce(&mut XdrReader<'_>) -> Result<T, Malformed>) {
        let mut reader = XdrReader::new(bytes);
        let _either = parse(&mut reader);
        assert!(reader.position() <= bytes.len());
    }
    let _either = receive(bytes);
    read(bytes, Attributes::read);
    read(bytes, WccData::read);
    read(bytes, results::lookup);
    read(bytes, results::access);
    read(bytes, |from| results::readlink(from, cutting(bytes)));
    read(bytes, |from| results::read(from, 100, cutting(bytes)));
    read(bytes, results::write);
    read(bytes, results::commit);
    read(bytes, results::created);
    read(bytes, results::link);
    read(bytes, results::rename);
    read(bytes, results::fsstat);
    read(bytes, results::fsinfo);
    read(bytes, results::pathconf);
    read(bytes, crate::mountd::mounted);
    for plus in [false, true] {
        if let Ok(listing) = DirectoryPage::read(&mut XdrReader::new(bytes), plus, cutting(bytes)) {
            listing.entries().for_each(|entry| assert!(!entry.name.contains(&b'/') && !entry.name.is_empty()));
        }
    }
}

#[test]
fn a_server_that_sends_more_than_it_says_is_taken_at_its_word() {
    let read = |count, eof, most, data: &[u8]| {
        let file_attributes = Nfs3Option::None;
        let bytes = packed(&theirs::READ3resok { file_attributes, count, eof, data: Opaque::borrowed(data) });
        let read = results::read(&mut XdrReader::new(&bytes), most, cutting(&bytes)).expect("well-formed");
        (read.data.to_vec(), read.is_end)
    };
    assert_eq!(read(3, true, 8, b"12345678"), (b"123".to_vec(), true));
    assert_eq!(read(8, true, 4, b"12345678"), (b"1234".to_vec(), false), "more than was asked for");
    assert_eq!(read(8, false, 8, b"123"), (b"123".to_vec(), false), "less than it says");
}

#[test]
fn names_that_cannot_be_names_are_left_out() {
    let names: [&[u8]; 5] = [b"good", b"", b"../../etc", b"zero\0", b"\xff"];
    let entries = names.map(|name| theirs::entry3 { fileid: 1, name: name.into(), cookie: 2 });
    let bytes = packed(&theirs::READDIR3resok {
        dir_attributes: Nfs3Option::None,
        cookieverf: theirs::cookieverf3::default(),
        reply: theirs::dirlist3 { entries: List(entries.into()), eof: true },
    });
    let listing = DirectoryPage::read(&mut XdrReader::new(&bytes), false, cutting(&bytes)).expect("well-formed");
    assert_eq!(listing.entries().map(|entry| entry.name.to_vec()).collect::<Vec<_>>(), [&b"good"[..], b"\xff"]);
}

#[test]
fn too_many_nanoseconds_are_less_than_a_second() {
    let mut bytes = packed(&their_attributes(&Attributes {
        kind: FileType::File,
        mode: 0,
        links: 1,
        uid: 0,
        gid: 0,
        size: 0,
        used: 0,
        device: (0, 0),
        fsid: 0,
        fileid: 0,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
    }));
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&[0xff; 4]);
    let read = Attributes::read(&mut XdrReader::new(&bytes)).expect("well-formed");
    assert_eq!(read.ctime.nanoseconds, 999_999_999);
}

#[test]
fn every_refusal_of_rpc_has_its_own_error() {
    use rpc::{accept_stat_data as accept, auth_stat, rejected_reply, reply_body};
    let reply = |body| {
        let record = packed(&rpc::rpc_msg { xid: 7, body: rpc::msg_body::REPLY(body) });
        match receive(&record).expect("well-formed") {
            RecordKind::Reply { xid: 7, results } => results,
            other => panic!("{other:?}"),
        }
    };
    let accepted = |reply_data| {
        reply(reply_body::MSG_ACCEPTED(rpc::accepted_reply { verf: rpc::opaque_auth::default(), reply_data }))
    };
    assert_eq!(accepted(accept::SUCCESS), Ok(24));
    assert_eq!(accepted(accept::PROG_UNAVAIL), Err(RpcError::ProgramUnavailable));
    let mismatch = RpcError::VersionUnsupported { lowest: 2, highest: 4 };
    assert_eq!(accepted(accept::PROG_MISMATCH { low: 2, high: 4 }), Err(mismatch));
    assert_eq!(accepted(accept::PROC_UNAVAIL), Err(RpcError::ProcedureUnavailable));
    assert_eq!(accepted(accept::GARBAGE_ARGS), Err(RpcError::GarbageArguments));
    assert_eq!(accepted(accept::SYSTEM_ERR), Err(RpcError::SystemError));
    let denied = |rejected| reply(reply_body::MSG_DENIED(rejected));
    assert_eq!(denied(rejected_reply::rpc_mismatch(3, 3)), Err(RpcError::OtherRpc));
    for (stat, denial) in [
        (auth_stat::AUTH_BADCRED, Denial::Credential),
        (auth_stat::AUTH_REJECTEDCRED, Denial::Credential),
        (auth_stat::AUTH_BADVERF, Denial::Verifier),
        (auth_stat::AUTH_TOOWEAK, Denial::TooWeak),
        (auth_stat::AUTH_FAILED, Denial::Other),
    ] {
        assert_eq!(denied(rejected_reply::auth_error(stat)), Err(RpcError::Denied(denial)));
    }
}
