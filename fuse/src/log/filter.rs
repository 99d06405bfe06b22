//! The filter of events: the directives of tracing-subscriber, without those for spans and fields.

use tracing::Level;
use tracing::level_filters::LevelFilter;

/// The directives, the most specific ones first.
pub(super) struct Filter(Vec<Directive>);

/// Lets events of a target through from a level on.
struct Directive {
    target: String,
    level: LevelFilter,
}

impl Filter {
    /// Parses directives, separated by commas. It ignores unknown ones, because the supervisor has checked them. Without any, it
    /// lets `info` and above through.
    pub(super) fn parse(text: &str) -> Self {
        let mut directives: Vec<Directive> = Vec::new();
        for directive in text.split(',').filter_map(|word| Directive::parse(word.trim())) {
            // Of several directives for a target, the last one applies.
            directives.retain(|earlier| earlier.target != directive.target);
            directives.push(directive);
        }
        if directives.is_empty() {
            directives.push(Directive { target: String::new(), level: LevelFilter::INFO });
        }
        directives.sort_by_key(|directive| std::cmp::Reverse(directive.target.len()));
        Self(directives)
    }

    pub(super) fn lets_through(&self, target: &str, level: Level) -> bool {
        let most_specific = self.0.iter().find(|directive| target.starts_with(&directive.target));
        most_specific.is_some_and(|directive| level <= directive.level)
    }
}

impl Directive {
    /// Parses `level`, `target` or `target=level`.
    fn parse(word: &str) -> Option<Self> {
        if word.is_empty() || word.contains(['[', '{']) {
            return None;
        }
        match word.split_once('=') {
            Some((target, "")) => Some(Self { target: target.to_owned(), level: LevelFilter::TRACE }),
            Some((target, level)) => Some(Self { target: target.to_owned(), level: level.parse().ok()? }),
            None => Some(match word.parse() {
                Ok(level) => Self { target: String::new(), level },
                Err(_) => Self { target: word.to_owned(), level: LevelFilter::TRACE },
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_directive_decides() {
        const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        for (text, target, logged) in [
            ("", "podfs_fuse::nfs", 3),
            ("warn", "podfs_fuse::nfs", 2),
            ("WARN", "podfs_fuse::nfs", 2),
            ("off", "podfs_fuse::nfs", 0),
            ("podfs=debug", "podfs_fuse::nfs", 4),
            ("podfs=debug", "tokio", 0),
            ("podfs_fuse::nfs", "podfs_fuse::nfs", 5),
            ("podfs_fuse::nfs=", "podfs_fuse::nfs", 5),
            ("podfs_fuse::nfs=trace, error,podfs_fuse=info", "podfs_fuse::nfs::rpc", 5),
            ("podfs_fuse::nfs=trace, error,podfs_fuse=info", "podfs_fuse::session", 3),
            ("podfs_fuse::nfs=trace, error,podfs_fuse=info", "tokio", 1),
            ("warn,debug", "podfs_fuse", 4),
            ("podfs=loud,[volume]=debug", "podfs_fuse", 3),
        ] {
            let filter = Filter::parse(text);
            let through = LEVELS.iter().filter(|level| filter.lets_through(target, **level)).count();
            assert_eq!(through, logged, "{text:?} for {target}");
        }
    }
}
