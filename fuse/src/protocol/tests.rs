//! Tests: messages with their descriptors, and the bytes that other versions read.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::region::golden::{assert_golden, golden};

#[test]
fn a_message_arrives_with_its_descriptor() {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    let (reader, mut writer) = io::pipe().expect("a pipe");
    send(&a, &ServerReply::Kept { keeper: 7 }, &[reader.as_fd()]).expect("sent");
    drop(reader);
    let (reply, mut descriptors) = receive::<ServerReply>(&b).expect("received").expect("a message");
    assert!(matches!(reply, ServerReply::Kept { keeper: 7 }));
    writer.write_all(b"x").expect("the pipe still has a reader");
    let mut byte = [0];
    std::fs::File::from(descriptors.pop().expect("a descriptor")).read_exact(&mut byte).expect("a byte");
    assert_eq!(&byte, b"x");
}

#[test]
fn a_message_arrives_with_more_descriptors_than_one_call_can_send() {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    let (reader, writer) = io::pipe().expect("a pipe");
    let many = vec![reader.as_fd(); 2 * MAX_DESCRIPTORS + 100];
    send(&a, &ServerReply::Kept { keeper: 7 }, &many).expect("sent");
    send(&a, &ServerReply::Done, &[writer.as_fd()]).expect("sent");
    let (reply, descriptors) = receive::<ServerReply>(&b).expect("received").expect("a message");
    assert!(matches!(reply, ServerReply::Kept { keeper: 7 }));
    assert_eq!(descriptors.len(), many.len());
    let (reply, descriptors) = receive::<ServerReply>(&b).expect("received").expect("a message");
    assert!(matches!(reply, ServerReply::Done));
    assert_eq!(descriptors.len(), 1);
}

#[test]
fn descriptors_of_a_message_with_too_many_of_them_are_closed() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let (a, b) = UnixStream::pair().expect("a socket pair");
    let (reader, writer) = io::pipe().expect("a pipe");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let many = [writer.as_fd(); MAX_DESCRIPTORS + 1];
    assert!(rights.push(SendAncillaryMessage::ScmRights(&many)));
    sendmsg(&a, &[IoSlice::new(&[0; 4])], &mut rights, SendFlags::empty()).expect("sent");
    receive::<ServerReply>(&b).expect_err("there are too many");
    drop(writer);
    let mut state = [PollFd::new(&reader, PollFlags::empty())];
    poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("polled");
    assert!(state[0].revents().contains(PollFlags::HUP), "no descriptor of the other end is open");
}

#[test]
fn a_large_message_arrives_whole() {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    let known: Vec<u32> = (0..1_000_000).collect();
    let message = ServerReply::Known(known.clone());
    let sender = std::thread::spawn(move || send(&a, &message, &[]));
    let (reply, _) = receive::<ServerReply>(&b).expect("received").expect("a message");
    sender.join().expect("the sender").expect("sent");
    assert!(matches!(reply, ServerReply::Known(got) if got == known));
}

#[test]
fn a_message_of_a_podfs_without_access_log_is_understood() {
    let root = serde_json::json!({"mode": 0o755, "gid": 0, "directories": []});
    let text = serde_json::json!({"Serve": {"volume": 3, "about": null, "root": root, "trace": true}}).to_string();
    let request: ServerRequest = serde_json::from_str(&text).expect("a message");
    let expected = Reporting { trace: true, audit: None };
    assert!(matches!(request, ServerRequest::Serve { reporting, .. } if reporting == expected));
}

#[test]
fn a_closed_socket_is_the_end_and_garbage_is_an_error() {
    let (a, b) = UnixStream::pair().expect("a socket pair");
    drop(a);
    assert!(receive::<ServerReply>(&b).expect("an end").is_none());
    let (mut a, b) = UnixStream::pair().expect("a socket pair");
    a.write_all(&[3, 0, 0, 0, b'x', b'x', b'x']).expect("written");
    assert!(receive::<ServerReply>(&b).is_err());
    a.write_all(&[0xff; 4]).expect("written");
    assert!(receive::<ServerReply>(&b).is_err());
}

/// Fails if messages have other bytes than in `recorded`, one message a line, or if one of the messages that `definition` begins is
/// not recorded.
fn assert_recorded<T: Serialize + DeserializeOwned>(recorded: &str, definition: &str) {
    let changed = "processes of other versions read this message: give changed messages a new VERSION and golden files of their own, \
                   and add a test that the older server is adopted. A new field that has a default needs no new VERSION; add a line \
                   with it";
    for line in recorded.lines() {
        let message: T = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}; {changed}"));
        assert_eq!(serde_json::to_string(&message).expect("JSON"), line, "{changed}");
    }
    let source = include_str!("../protocol.rs").split(definition).nth(1).expect("the definition");
    let lines = source.split("\n}").next().unwrap_or_default().lines().filter_map(|line| line.strip_prefix("    "));
    let names = lines.filter(|line| line.starts_with(char::is_uppercase));
    let names = names.map(|line| line.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default());
    let names: Vec<&str> = names.collect();
    assert!(names.len() > 8, "these are not all: {names:?}");
    for name in names {
        let is_recorded = recorded.lines().any(|line| line.trim_start_matches('{').starts_with(&format!("\"{name}\"")));
        assert!(is_recorded, "record the bytes of {name}, in a line");
    }
}

#[test]
fn messages_have_the_bytes_that_other_versions_read() {
    assert_recorded::<ServerRequest>(text(golden!("server-requests.jsonl")), "pub enum ServerRequest {");
    assert_recorded::<ServerReply>(text(golden!("server-replies.jsonl")), "pub enum ServerReply {");
    // The length, then JSON.
    assert_golden("server-frame.bin", golden!("server-frame.bin"), &frame(&ServerReply::Done).expect("a frame"));
    let (mut a, b) = UnixStream::pair().expect("a socket pair");
    a.write_all(golden!("server-frame.bin")).expect("written");
    let (reply, _) = receive::<ServerReply>(&b).expect("received").expect("a message");
    assert!(matches!(reply, ServerReply::Done));
}

fn text(bytes: &'static [u8]) -> &'static str {
    str::from_utf8(bytes).expect("text")
}

#[test]
fn a_greeting_with_an_unknown_protocol_is_refused_by_the_names_of_both_programs() {
    let greeting = text(golden!("server-requests.jsonl")).lines().next().expect("the greeting");
    let ServerRequest::Hello(known) = serde_json::from_str(greeting).expect("a message") else {
        panic!("the first message is a greeting: {greeting}")
    };
    check(&Greeting::new("0.9", &known.pod), &known).expect("the protocol of today");
    for protocol in [0, 1, VERSION + 1, u32::MAX] {
        let later = Greeting { protocol, ..known.clone() };
        let refused = check(&Greeting::new("0.9", &known.pod), &later).expect_err("unknown").to_string();
        assert_eq!(
            refused,
            text(golden!("server-refusal.txt")).trim_end(),
            "supervisors of other versions look for these words"
        );
        assert!(refused.contains(OTHER_PROTOCOL));
    }
}

#[test]
fn an_unknown_message_is_an_error() {
    for unknown in [r#"{"Dance":{"volume":1}}"#, r#""Dance""#, r#"{"Serve":{"volume":1}}"#] {
        serde_json::from_str::<ServerRequest>(unknown).expect_err(unknown);
        serde_json::from_str::<ServerReply>(unknown).expect_err(unknown);
    }
}
