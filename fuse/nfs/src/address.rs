//! The address of an export: a server, and a directory of it. Only this module parses and prints such addresses.

use std::fmt;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};

use serde::{Deserialize, Serialize};

/// The server and the path of an export. Its text is `server:path`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportAddress {
    /// The server's name or address. An IPv6 address is without brackets.
    pub server: String,
    /// The exported directory, an absolute path on the server.
    pub path: String,
}

/// Why a server and a path are no address of an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The path is not absolute.
    #[error("must be an absolute path")]
    RelativePath,
    /// The path has a NUL, at which a path ends for the kernel.
    #[error("must not contain a NUL character")]
    NulInPath,
    /// The server has a character that no name and no address has.
    #[error("{0:?} is no name or address of a server")]
    Server(String),
}

impl AddressError {
    /// Whether the error is about the path, not the server.
    pub fn is_about_path(&self) -> bool {
        matches!(self, AddressError::RelativePath | AddressError::NulInPath)
    }
}

impl ExportAddress {
    /// The address of the export `path` of `server`. An IPv6 address may be in brackets.
    ///
    /// # Errors
    /// [`AddressError`] if the path or the server is invalid.
    pub fn parse(server: &str, path: &str) -> Result<ExportAddress, AddressError> {
        if !path.starts_with('/') {
            return Err(AddressError::RelativePath);
        }
        if path.contains('\0') {
            return Err(AddressError::NulInPath);
        }
        let inner = server.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(server);
        if inner.is_empty() || inner.contains(|c: char| c.is_whitespace() || c.is_control() || "/,[]".contains(c)) {
            return Err(AddressError::Server(server.to_owned()));
        }
        Ok(ExportAddress { server: inner.to_owned(), path: path.to_owned() })
    }

    /// The source of a mount as the kernel and `/proc/self/mounts` write it: with an IPv6 address in brackets.
    pub fn mount_source(&self) -> String {
        let ExportAddress { server, path } = self;
        if server.contains(':') { format!("[{server}]:{path}") } else { format!("{server}:{path}") }
    }

    /// Whether the volume names the server by an IP address, which never has to be resolved.
    pub fn is_numeric(&self) -> bool {
        self.server.parse::<IpAddr>().is_ok()
    }
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.server, self.path)
    }
}

/// The addresses of a host, in the resolver's order.
///
/// # Errors
/// Those of the resolver.
pub fn resolve(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_ipv6_has_brackets_only_where_the_kernel_wants_them() {
        let address = ExportAddress::parse("[fd00::7]", "/srv").expect("an address");
        assert_eq!((address.to_string().as_str(), address.mount_source().as_str()), ("fd00::7:/srv", "[fd00::7]:/srv"));
        assert!(address.is_numeric());
        let named = ExportAddress::parse("nas", "/srv").expect("an address");
        assert_eq!(named.to_string(), named.mount_source());
        assert!(!named.is_numeric());
    }

    #[test]
    fn text_that_is_no_address_is_refused() {
        assert_eq!(ExportAddress::parse("nas", "srv"), Err(AddressError::RelativePath));
        assert_eq!(ExportAddress::parse("nas", "/a\0b"), Err(AddressError::NulInPath));
        for server in ["", "[]", "a b", "a/b", "a,b"] {
            assert_eq!(ExportAddress::parse(server, "/srv"), Err(AddressError::Server(server.to_owned())));
        }
    }
}
