//! Sentences about a pod: at most ten distinct ones, so that a pod which fails in many ways stays readable.

use std::collections::VecDeque;

/// How many sentences are kept.
const MOST: usize = 10;

/// Distinct sentences, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DistinctSentences(VecDeque<String>);

impl DistinctSentences {
    /// Adds a sentence. The eleventh distinct one replaces the oldest.
    pub fn add(&mut self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        if !self.0.contains(&sentence) {
            if self.0.len() == MOST {
                self.0.pop_front();
            }
            self.0.push_back(sentence);
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sentences, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_keeps_its_last_ten_distinct_errors() {
        let mut errors = DistinctSentences::default();
        (0..12).for_each(|number| errors.add(format!("error {number}")));
        errors.add("error 11");
        let kept: Vec<_> = errors.iter().collect();
        assert_eq!((kept.len(), kept[0], kept[9]), (10, "error 2", "error 11"));
    }
}
