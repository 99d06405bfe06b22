//! The messages of a connection that stays open, read one after another by an asynchronous task.

use std::io::{self, ErrorKind};
use std::os::unix::net;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

/// A connection, and the bytes of its next message that have arrived.
pub(super) struct Frames {
    pub(super) stream: UnixStream,
    received: Vec<u8>,
}

impl Frames {
    /// Reads from `stream` from now on. Call it on a tokio runtime.
    ///
    /// # Errors
    /// When the runtime cannot wait for the socket.
    pub(super) fn new(stream: net::UnixStream) -> io::Result<Frames> {
        stream.set_nonblocking(true)?;
        Ok(Frames { stream: UnixStream::from_std(stream)?, received: Vec::new() })
    }

    /// Waits for the next message, and returns its bytes, at most `longest`; `None` when the other process has closed the
    /// connection. Cancel-safe.
    ///
    /// # Errors
    /// When the message is longer (`InvalidData`), or the socket fails.
    pub(super) async fn next(&mut self, longest: usize) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(message) = self.take(longest)? {
                return Ok(Some(message));
            }
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) => return Ok(None),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                read => drop(read?),
            }
        }
    }

    /// The next message, if all of its bytes have arrived.
    fn take(&mut self, longest: usize) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.received.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_ne_bytes(*length) as usize;
        if length > longest {
            return Err(io::Error::new(ErrorKind::InvalidData, "the message is too long"));
        }
        let Some(message) = rest.get(..length).map(<[u8]>::to_vec) else { return Ok(None) };
        self.received.drain(..4 + length);
        if self.received.is_empty() {
            // The next message may come in hours: this frees the memory of the last one.
            self.received = Vec::new();
        }
        Ok(Some(message))
    }
}
