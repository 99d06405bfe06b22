//! The bytes that a kubelet sends to a registration socket: the encoded path as `:authority`, which the HTTP library of these
//! tests refuses to send. A real kubelet's gRPC library leaves `@` as it is and encodes `/`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use podfs::csi::registration::PluginInfo;
use prost::Message;

use super::kubelet::Kubelet;

/// Types of frames (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// The stream of the only request.
const STREAM: u32 = 1;
const PROTOCOL_ERROR: u32 = 1;

/// The outcome of a request.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// The first bytes of its answer.
    Answer(Vec<u8>),
    /// The stream ends with this error.
    Reset(u32),
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("small").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), body].concat()
}

/// A string of HPACK, without Huffman's code (RFC 7541, 5).
fn text(text: &str) -> Vec<u8> {
    const PREFIX: usize = 127;
    let mut coded = match text.len() {
        length if length < PREFIX => vec![u8::try_from(length).expect("small")],
        length => {
            let (mut remaining, mut coded) = (length - PREFIX, vec![127]);
            while remaining >= 128 {
                coded.push(u8::try_from(remaining % 128).expect("small") | 128);
                remaining /= 128;
            }
            coded.push(u8::try_from(remaining).expect("small"));
            coded
        }
    };
    coded.extend(text.as_bytes());
    coded
}

/// Calls GetInfo with this authority.
fn get_info(socket: &Path, authority: &str) -> Outcome {
    let mut stream = UnixStream::connect(socket).expect("podfs listens");
    // HPACK has numbers for `:method: POST` and `:scheme: http`, and for the names :authority, :path and content-type.
    let headers = [
        vec![0x83, 0x86],
        [vec![0x01], text(authority)].concat(),
        [vec![0x04], text("/pluginregistration.Registration/GetInfo")].concat(),
        [vec![0x0f, 0x10], text("application/grpc")].concat(),
        [vec![0x00], text("te"), text("trailers")].concat(),
    ]
    .concat();
    let no_fields = [0; 5];
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, END_HEADERS, STREAM, &headers),
        frame(DATA, END_STREAM, STREAM, &no_fields),
    ];
    stream.write_all(&request.concat()).expect("sent");
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).expect("a frame");
        let mut body = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut body).expect("a whole frame");
        let of = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        match head[3] {
            DATA if of == STREAM => return Outcome::Answer(body),
            RST_STREAM if of == STREAM => {
                return Outcome::Reset(u32::from_be_bytes(body.try_into().expect("a number")));
            }
            _ => {}
        }
    }
}

#[test]
fn a_malformed_authority_reaches_podfs_thanks_to_the_name_of_its_socket() {
    let kubelet = Kubelet::new();
    let _daemon = kubelet.start();
    let socket = kubelet.root().join("plugins_registry/podfs.io@reg.sock");
    let authority = socket.to_str().expect("text").replace('/', "%2F");
    let Outcome::Answer(answer) = get_info(&socket, &authority) else { panic!("it is refused") };
    // Five bytes in front say how long the message is.
    let info = PluginInfo::decode(&answer[5..]).expect("a message");
    assert_eq!((info.name.as_str(), info.r#type.as_str()), ("podfs.io", "CSIPlugin"));
    let without = authority.replace('@', "-");
    assert_eq!(
        get_info(&socket, &without),
        Outcome::Reset(PROTOCOL_ERROR),
        "without the `@`, podfs never sees the call"
    );
}
