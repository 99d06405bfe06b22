//! The errors of a pod: at most ten distinct ones (5.1), so that a pod which fails in many ways stays readable.

use std::collections::VecDeque;

/// How many errors are kept.
const MOST: usize = 10;

/// Distinct errors, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DistinctErrors(VecDeque<String>);

impl DistinctErrors {
    /// Adds an error. The eleventh distinct one replaces the oldest.
    pub fn add(&mut self, error: impl Into<String>) {
        let error = error.into();
        if !self.0.contains(&error) {
            if self.0.len() == MOST {
                self.0.pop_front();
            }
            self.0.push_back(error);
        }
    }

    /// Whether there are no errors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The errors, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_keeps_its_last_ten_distinct_errors() {
        let mut errors = DistinctErrors::default();
        (0..12).for_each(|number| errors.add(format!("error {number}")));
        errors.add("error 11");
        let kept: Vec<_> = errors.iter().collect();
        assert_eq!((kept.len(), kept[0], kept[9]), (10, "error 2", "error 11"));
    }
}
