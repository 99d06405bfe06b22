//! Id mappings of a user namespace: the users and groups of a pod, and those of the node that they stand for.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A range of ids in the pod, and the range of the same length on the node that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", try_from = "Parts", into = "Parts")]
pub struct IdMapping {
    container_id: u32,
    host_id: u32,
    length: u32,
}

/// The numbers of a mapping, as messages have them.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Parts {
    container_id: u32,
    host_id: u32,
    length: u32,
}

/// Why a text or numbers are no mapping.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMapping {
    /// The text does not have three numbers.
    #[error("{0:?} maps no ids; write CONTAINER:HOST:LENGTH, such as 0:100000:65536")]
    Syntax(String),
    /// The range is empty.
    #[error("a mapping of {container_id}:{host_id} with length 0 maps no id; give it a length")]
    Empty {
        /// The first id in the pod.
        container_id: u32,
        /// The first id on the node.
        host_id: u32,
    },
    /// The range has ids that Linux does not have.
    #[error("a mapping of {length} ids from {first} ends beyond the last id of Linux, 4294967294; give it fewer")]
    TooLong {
        /// The first id.
        first: u32,
        /// The number of ids in the range.
        length: u32,
    },
}

impl IdMapping {
    /// `length` ids of the pod from `container_id` on are those of the node from `host_id` on.
    ///
    /// # Errors
    /// When the length is 0, or when a range has an id that Linux does not have.
    pub fn new(container_id: u32, host_id: u32, length: u32) -> Result<IdMapping, InvalidMapping> {
        if length == 0 {
            return Err(InvalidMapping::Empty { container_id, host_id });
        }
        // System calls use the last number, which is -1, for "no id".
        match [container_id, host_id].into_iter().find(|first| first.checked_add(length).is_none()) {
            Some(first) => Err(InvalidMapping::TooLong { first, length }),
            None => Ok(IdMapping { container_id, host_id, length }),
        }
    }

    /// The first id in the pod.
    pub fn container_id(self) -> u32 {
        self.container_id
    }

    /// The first id on the node.
    pub fn host_id(self) -> u32 {
        self.host_id
    }

    /// The number of ids in the range.
    pub fn length(self) -> u32 {
        self.length
    }
}

impl FromStr for IdMapping {
    type Err = InvalidMapping;

    /// Parses `CONTAINER:HOST:LENGTH`.
    fn from_str(text: &str) -> Result<IdMapping, InvalidMapping> {
        let numbers: Option<Vec<u32>> = text.split(':').map(|number| number.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[container_id, host_id, length]) => IdMapping::new(container_id, host_id, length),
            _ => Err(InvalidMapping::Syntax(text.to_owned())),
        }
    }
}

impl TryFrom<Parts> for IdMapping {
    type Error = InvalidMapping;

    fn try_from(Parts { container_id, host_id, length }: Parts) -> Result<IdMapping, InvalidMapping> {
        IdMapping::new(container_id, host_id, length)
    }
}

impl From<IdMapping> for Parts {
    fn from(IdMapping { container_id, host_id, length }: IdMapping) -> Parts {
        Parts { container_id, host_id, length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_three_numbers_whose_ids_exist() {
        let parsed: IdMapping = "0:100000:65536".parse().expect("a mapping");
        assert_eq!(parsed, IdMapping::new(0, 100_000, 65_536).expect("a mapping"));
        assert_eq!("0:0:4294967295".parse::<IdMapping>().expect("all ids").length(), u32::MAX);
        let rows = [
            ("0:1", "\"0:1\" maps no ids; write CONTAINER:HOST:LENGTH, such as 0:100000:65536"),
            ("a:b:c", "\"a:b:c\" maps no ids; write CONTAINER:HOST:LENGTH, such as 0:100000:65536"),
            ("0:1:-1", "\"0:1:-1\" maps no ids; write CONTAINER:HOST:LENGTH, such as 0:100000:65536"),
            ("0:5:0", "a mapping of 0:5 with length 0 maps no id; give it a length"),
            (
                "0:4294967000:65536",
                "a mapping of 65536 ids from 4294967000 ends beyond the last id of Linux, 4294967294; give it fewer",
            ),
        ];
        for (text, expected) in rows {
            assert_eq!(text.parse::<IdMapping>().map_err(|error| error.to_string()), Err(expected.to_owned()));
        }
    }
}
