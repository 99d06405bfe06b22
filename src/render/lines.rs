//! The lines that differ between two texts, with three lines of context: the hunks of a unified diff.

/// Lines of context around a change.
const CONTEXT: usize = 3;
/// The most pairs of lines that are compared for a shortest diff. In a larger diff, all lines from the first to the last change
/// are replaced as a whole.
const MOST_PAIRS: usize = 4 << 20;

/// Neighbouring changes, with their context.
pub struct Hunk<'a> {
    /// The number of lines of the old text before the hunk.
    pub old: usize,
    /// The number of lines of the new text before the hunk.
    pub new: usize,
    /// Its lines with their line ends and a sign: ` ` if both texts have the line, `-` if only the old text has it, `+` if only
    /// the new text has it.
    pub lines: Vec<(char, &'a str)>,
}

impl Hunk<'_> {
    /// The number of lines of the old text in the hunk.
    pub fn old_count(&self) -> usize {
        self.lines.iter().filter(|(sign, _)| *sign != '+').count()
    }

    /// The number of lines of the new text in the hunk.
    pub fn new_count(&self) -> usize {
        self.lines.iter().filter(|(sign, _)| *sign != '-').count()
    }
}

/// The hunks that lead from one text to the other.
pub fn hunks<'a>(old: &'a str, new: &'a str) -> Vec<Hunk<'a>> {
    let script = script(&lines(old), &lines(new));
    let is_near = |at: usize| {
        let near = at.saturating_sub(CONTEXT)..(at + CONTEXT + 1).min(script.len());
        script[near].iter().any(|(sign, _)| *sign != ' ')
    };
    let mut hunks: Vec<Hunk<'a>> = Vec::new();
    let (mut old, mut new, mut is_open) = (0, 0, false);
    for (at, (sign, line)) in script.iter().enumerate() {
        if is_near(at) {
            if !is_open {
                hunks.push(Hunk { old, new, lines: Vec::new() });
            }
            if let Some(hunk) = hunks.last_mut() {
                hunk.lines.push((*sign, line));
            }
        }
        is_open = is_near(at);
        old += usize::from(*sign != '+');
        new += usize::from(*sign != '-');
    }
    hunks
}

/// Lines with their ends.
fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// All lines of both texts in order, with the signs of [`Hunk::lines`].
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(char, &'a str)> {
    let begin = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let (old_rest, new_rest) = (&old[begin..], &new[begin..]);
    let end = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| a == b).count();
    let (removed, added) = (&old_rest[..old_rest.len() - end], &new_rest[..new_rest.len() - end]);
    let same = |lines: &[&'a str]| lines.iter().map(|line| (' ', *line)).collect::<Vec<_>>();
    [same(&old[..begin]), changed(removed, added), same(&old[old.len() - end..])].concat()
}

/// A shortest way from `old` to `new` by a longest common subsequence, unless there are too many lines for that.
fn changed<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(char, &'a str)> {
    let signed = |sign: char, lines: &[&'a str]| lines.iter().map(|line| (sign, *line)).collect::<Vec<_>>();
    if old.len().saturating_mul(new.len()) > MOST_PAIRS {
        return [signed('-', old), signed('+', new)].concat();
    }
    // `common[i * width + j]`: the length of the longest common subsequence of `old[i..]` and `new[j..]`.
    let width = new.len() + 1;
    let mut common = vec![0_u32; (old.len() + 1) * width];
    for (i, a) in old.iter().enumerate().rev() {
        for (j, b) in new.iter().enumerate().rev() {
            common[i * width + j] = match a == b {
                true => common[(i + 1) * width + j + 1] + 1,
                false => common[(i + 1) * width + j].max(common[i * width + j + 1]),
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut script = Vec::new();
    while i < old.len() && j < new.len() {
        if old[i] == new[j] {
            script.push((' ', old[i]));
            (i, j) = (i + 1, j + 1);
        } else if common[(i + 1) * width + j] >= common[i * width + j + 1] {
            script.push(('-', old[i]));
            i += 1;
        } else {
            script.push(('+', new[j]));
            j += 1;
        }
    }
    script.extend(signed('-', &old[i..]));
    script.extend(signed('+', &new[j..]));
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(old: &str, new: &str) -> Vec<String> {
        let hunk = |hunk: &Hunk<'_>| {
            let lines: Vec<_> = hunk.lines.iter().map(|(sign, line)| format!("{sign}{}", line.trim_end())).collect();
            format!("{}+{} {}", hunk.old, hunk.new, lines.join(" "))
        };
        hunks(old, new).iter().map(hunk).collect()
    }

    #[test]
    fn changes_have_context_and_far_ones_are_apart() {
        assert_eq!(shown("a\nb\n", "a\nb\n"), Vec::<String>::new());
        assert_eq!(shown("", "a\n"), ["0+0 +a"]);
        assert_eq!(shown("a\n", ""), ["0+0 -a"]);
        assert_eq!(shown("a\nb\nc\n", "a\nx\nc\n"), ["0+0  a -b +x  c"]);
        let old: String = (0..20).map(|number| format!("{number}\n")).collect();
        let new = old.replace("5\n", "five\n").replace("18\n", "");
        // The 15 ends with a 5, too.
        assert_eq!(
            shown(&old, &new),
            ["2+2  2  3  4 -5 +five  6  7  8", "12+12  12  13  14 -15 +1five  16  17 -18  19"]
        );
    }

    #[test]
    fn a_line_without_an_end_differs_from_one_with() {
        assert_eq!(shown("a", "a\n"), ["0+0 -a +a"]);
    }

    proptest::proptest! {
        #[test]
        fn both_texts_can_be_put_together_from_the_script(old in "[ab\n]{0,30}", new in "[ab\n]{0,30}") {
            let script = script(&lines(&old), &lines(&new));
            let side = |other: char| script.iter().filter(|(sign, _)| *sign != other).map(|(_, line)| *line).collect::<String>();
            proptest::prop_assert_eq!(&side('+'), &old);
            proptest::prop_assert_eq!(&side('-'), &new);
        }
    }
}
