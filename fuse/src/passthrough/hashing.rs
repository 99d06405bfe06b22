//! Hashes of nodes' numbers and identities.
//!
//! A successor puts each node of its predecessor into two tables while callers wait, so a hash is a multiplication for each word
//! and not a cipher. Each table has a random key, which callers do not know. The key comes from the kernel, not from the standard
//! library: the standard library counts up from a number of the process, and a server that is a clone of a keeper has the number of
//! its predecessor.

use std::hash::{BuildHasher, Hasher};
use std::time::SystemTime;

/// 2^64 divided by the golden ratio: no small multiple of it is close to 2^64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Begins hashes with a random key.
#[derive(Clone, Copy, Debug)]
pub struct HashKey([u64; 2]);

/// A hash of some words.
pub struct WordHasher {
    state: u64,
    factor: u64,
}

impl Default for HashKey {
    fn default() -> Self {
        // The factor is odd, so no bit of a word is lost.
        Self([random(), random() | 1])
    }
}

impl BuildHasher for HashKey {
    type Hasher = WordHasher;

    fn build_hasher(&self) -> WordHasher {
        let Self([state, factor]) = *self;
        WordHasher { state, factor }
    }
}

/// The product of two words, its upper half combined with its lower half: the tables use the first and the last bits of a hash.
fn folded(word: u64, factor: u64) -> u64 {
    let product = u128::from(word) * u128::from(factor);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Hasher for WordHasher {
    fn finish(&self) -> u64 {
        // Without this multiplication, one key in six would spread consecutive numbers over few places of a table, because a
        // multiple of the key's factor is close to 2^64.
        folded(self.state, GOLDEN)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.state = folded(self.state ^ word, self.factor);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word.cast_unsigned() as u64);
    }
}

/// A random number that no other process can guess.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // The call fails only in a sandbox that forbids it.
        _ => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_in_a_row_spread_over_a_table() {
        // Without the multiplication in `finish`, the last two keys use only 29 302 and 22 184 places.
        let keys = [
            HashKey::default(),
            HashKey([9_747_539_617_297_836_521, 11_497_713_590_486_599_791]),
            HashKey([8_281_073_816_282_992_678, 3_537_292_029_075_303_123]),
        ];
        for key in keys {
            let hashes: Vec<u64> = (0..50_000_u64).map(|number| key.hash_one(number)).collect();
            for part in [|hash: u64| hash & 0xffff, |hash: u64| hash >> 48] {
                let places: HashSet<u64> = hashes.iter().map(|hash| part(*hash)).collect();
                // Random numbers use about 35 000 places.
                assert!(places.len() > 30_000, "{} places of {key:?}", places.len());
            }
        }
    }

    #[test]
    fn each_key_hashes_in_its_own_way() {
        let (one, other) = (HashKey::default(), HashKey::default());
        assert_ne!(one.hash_one([1_u64, 2]), other.hash_one([1_u64, 2]));
        assert_ne!(one.hash_one([1_u64, 2]), one.hash_one([2_u64, 1]));
        assert_eq!(one.hash_one([1_u64, 2]), one.hash_one([1_u64, 2]));
    }
}
