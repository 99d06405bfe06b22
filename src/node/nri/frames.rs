//! Bytes of an NRI connection: ttrpc messages of several connections in frames on one socket. Plain data.
//!
//! A frame is the number of its connection, its length and a part of that connection's bytes; no frame opens or closes
//! a connection. A message is a header of ten bytes (length, stream, type, flags) and an envelope. Frames and messages
//! need not begin together. Numbers are big endian.
//!
//! podfs has its own code for this instead of the crate ttrpc: that crate would bring a second library for the messages
//! of protobuf, and does not split a socket into several connections. podfs needs little of both.

use std::collections::BTreeMap;

/// The connection for requests of the runtime to the plugin.
pub const TO_PLUGIN: u32 = 1;
/// The connection for requests of the plugin to the runtime.
pub const TO_RUNTIME: u32 = 2;
/// The longest part of a connection in a frame to a runtime: a longer one breaks the connection.
pub const LONGEST_PART: usize = 4096;
/// The longest message.
const LONGEST_MESSAGE: usize = 4 << 20;
/// The longest part of a connection in a frame from a runtime: a message and its header.
const LONGEST_RECEIVED: usize = LONGEST_MESSAGE + MESSAGE_HEADER;
const FRAME_HEADER: usize = 8;
const MESSAGE_HEADER: usize = 10;

/// The type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// A request.
    Request,
    /// The answer to the request of the same stream.
    Response,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TtrpcMessage {
    /// Its connection.
    pub connection: u32,
    /// The number of the request: this message is the request, or answers it.
    pub stream: u32,
    /// Its type.
    pub kind: MessageType,
    /// The envelope.
    pub body: Vec<u8>,
}

/// Why bytes do not belong to an NRI connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A frame for another connection than [`TO_PLUGIN`] and [`TO_RUNTIME`].
    #[error("a frame for connection {0}; podfs knows only 1 and 2")]
    Connection(u32),
    /// A frame or a message is too long.
    #[error("a frame of {0} bytes; podfs takes at most {LONGEST_RECEIVED}")]
    Length(usize),
    /// A message that is neither a request nor a response.
    #[error("a message of type {0}; podfs knows only 1 and 2")]
    Kind(u8),
}

/// Assembles messages from the bytes of a socket.
#[derive(Debug, Default)]
pub struct FrameReader {
    socket: ByteQueue,
    connections: BTreeMap<u32, ByteQueue>,
}

/// Bytes that are taken from the front. A frame may have no content but its header, so the time for each must not depend on the number
/// of bytes behind it.
#[derive(Debug, Default)]
struct ByteQueue {
    bytes: Vec<u8>,
    /// How many of the bytes are taken.
    taken: usize,
    /// How many bytes have been moved to the front.
    #[cfg(test)]
    moved: usize,
}

impl ByteQueue {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The bytes that are not taken.
    fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    /// Takes bytes from the front. Moves the others to the front of the memory when they are the smaller half, so no byte is moved more
    /// often, on average, than it is added.
    fn take(&mut self, count: usize) {
        self.taken += count;
        if self.taken * 2 >= self.bytes.len() {
            #[cfg(test)]
            {
                self.moved += self.bytes.len() - self.taken;
            }
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
    }
}

impl FrameReader {
    /// Takes bytes of the socket.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.socket.add(bytes);
    }

    /// The next complete message.
    ///
    /// # Errors
    /// When the bytes are garbage: podfs cannot parse anything after them.
    pub fn message(&mut self) -> Result<Option<TtrpcMessage>, FrameError> {
        self.take_frames()?;
        for (connection, queue) in &mut self.connections {
            let bytes = queue.rest();
            let Some(([length, stream], [kind, _flags])) = header(bytes) else { continue };
            let length = length as usize;
            if length > LONGEST_MESSAGE {
                return Err(FrameError::Length(length));
            }
            let kind = match kind {
                1 => MessageType::Request,
                2 => MessageType::Response,
                other => return Err(FrameError::Kind(other)),
            };
            if bytes.len() < MESSAGE_HEADER + length {
                continue;
            }
            let body = bytes[MESSAGE_HEADER..MESSAGE_HEADER + length].to_vec();
            queue.take(MESSAGE_HEADER + length);
            return Ok(Some(TtrpcMessage { connection: *connection, stream, kind, body }));
        }
        Ok(None)
    }

    /// Gives each connection the bytes of its complete frames.
    fn take_frames(&mut self) -> Result<(), FrameError> {
        while let Some([connection, length]) = self.socket.rest().first_chunk::<FRAME_HEADER>().map(numbers) {
            let length = length as usize;
            if ![TO_PLUGIN, TO_RUNTIME].contains(&connection) {
                return Err(FrameError::Connection(connection));
            }
            if length > LONGEST_RECEIVED {
                return Err(FrameError::Length(length));
            }
            let end = FRAME_HEADER + length;
            let Some(part) = self.socket.rest().get(FRAME_HEADER..end) else { return Ok(()) };
            self.connections.entry(connection).or_default().add(part);
            self.socket.take(end);
        }
        Ok(())
    }
}

fn header(bytes: &[u8]) -> Option<([u32; 2], [u8; 2])> {
    let (front, rest) = bytes.split_first_chunk::<FRAME_HEADER>()?;
    Some((numbers(front), *rest.first_chunk()?))
}

fn numbers(bytes: &[u8; FRAME_HEADER]) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = *bytes;
    [u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h])]
}

impl TtrpcMessage {
    /// Its bytes on the socket, in frames that a runtime accepts.
    pub fn frames(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(MESSAGE_HEADER + self.body.len());
        message.extend_from_slice(&length(&self.body));
        message.extend_from_slice(&self.stream.to_be_bytes());
        let kind = match self.kind {
            MessageType::Request => 1,
            MessageType::Response => 2,
        };
        message.extend_from_slice(&[kind, 0]);
        message.extend_from_slice(&self.body);
        let mut frames = Vec::with_capacity(message.len() + FRAME_HEADER);
        for part in message.chunks(LONGEST_PART) {
            frames.extend_from_slice(&self.connection.to_be_bytes());
            frames.extend_from_slice(&length(part));
            frames.extend_from_slice(part);
        }
        frames
    }
}

fn length(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).expect("messages are short").to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(connection: u32, stream: u32, length: usize) -> TtrpcMessage {
        let body = (0..length).map(|index| (index % 251) as u8).collect();
        TtrpcMessage { connection, stream, kind: MessageType::Response, body }
    }

    fn all(reader: &mut FrameReader) -> Vec<TtrpcMessage> {
        std::iter::from_fn(|| reader.message().expect("no garbage")).collect()
    }

    #[test]
    fn a_long_message_goes_in_frames_that_a_runtime_takes_and_comes_out_whole() {
        let long = message(TO_PLUGIN, 3, 10_000);
        let frames = long.frames();
        let mut rest = frames.as_slice();
        let mut lengths = Vec::new();
        while let Some((front, after)) = rest.split_first_chunk::<FRAME_HEADER>() {
            let [connection, length] = numbers(front);
            assert_eq!(connection, TO_PLUGIN);
            lengths.push(length);
            rest = &after[length as usize..];
        }
        assert_eq!(lengths, [4096, 4096, 10_010 - 2 * 4096]);
        let mut reader = FrameReader::default();
        reader.feed(&frames);
        assert_eq!(all(&mut reader), [long]);
    }

    #[test]
    fn messages_come_out_however_their_bytes_are_cut_and_mixed() {
        let (one, other) = (message(TO_PLUGIN, 1, 5000), message(TO_RUNTIME, 1, 5));
        let (front, back) = (one.frames(), other.frames());
        // The second frame of the first message comes after the other connection's message.
        let cut = FRAME_HEADER + LONGEST_PART;
        let bytes = [&front[..cut], &back, &front[cut..]].concat();
        let mut reader = FrameReader::default();
        let mut read = Vec::new();
        for byte in bytes {
            reader.feed(&[byte]);
            read.extend(all(&mut reader));
        }
        assert_eq!(read, [other, one]);
    }

    #[test]
    fn many_empty_frames_and_many_short_messages_cost_no_more_than_their_bytes() {
        let frame = [TO_PLUGIN.to_be_bytes(), [0; 4]].concat();
        let empty = frame.repeat(100_000);
        let mut reader = FrameReader::default();
        reader.feed(&empty);
        assert_eq!(all(&mut reader), []);
        assert!(reader.socket.rest().is_empty() && reader.socket.moved <= empty.len(), "{}", reader.socket.moved);
        let short: Vec<u8> = (0..100_000).flat_map(|stream| message(TO_PLUGIN, stream, 0).frames()).collect();
        reader.feed(&short);
        assert_eq!(all(&mut reader).len(), 100_000);
        let moved = reader.connections[&TO_PLUGIN].moved;
        assert!(moved <= short.len(), "{moved}");
    }

    #[test]
    fn two_messages_in_one_frame_are_two() {
        let messages = [message(TO_PLUGIN, 1, 7), message(TO_PLUGIN, 3, 0)];
        let bytes: Vec<u8> = messages.iter().flat_map(|one| one.frames().split_off(FRAME_HEADER)).collect();
        let mut reader = FrameReader::default();
        reader.feed(&[&TO_PLUGIN.to_be_bytes(), &length(&bytes)[..], &bytes].concat());
        assert_eq!(all(&mut reader), messages);
    }

    #[test]
    fn garbage_is_refused_before_memory_of_its_length_is_used() {
        let read = |bytes: &[u8]| {
            let mut reader = FrameReader::default();
            reader.feed(bytes);
            reader.message()
        };
        assert_eq!(read(b"HTTP/1.1 400 Bad"), Err(FrameError::Connection(0x4854_5450)));
        assert_eq!(read(&[0, 0, 0, 1, 255, 0, 0, 0]), Err(FrameError::Length(0xff00_0000)));
        let message = [0, 0, 0, 1, 0, 0, 0, 10, 0, 0, 0, 1, 0, 0, 0, 1, 9, 0];
        assert_eq!(read(&message), Err(FrameError::Kind(9)));
        let long = [0, 0, 0, 1, 0, 0, 0, 10, 255, 0, 0, 0, 0, 0, 0, 1, 1, 0];
        assert_eq!(read(&long), Err(FrameError::Length(0xff00_0000)));
        assert_eq!(read(&[0, 0]), Ok(None));
    }
}
