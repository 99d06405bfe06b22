//! A rendering for people: a line for each entry, and the text of files below their lines.

use std::fmt::Write;

use super::model::{EntryKind, RenderedContent, RenderedEntry, Rendering, visible};

/// The most lines of a file that the text shows.
const MAX_LINES: usize = 20;

/// The rendering as text. It is not escaped: names and contents are those of the manifests.
pub fn text(rendering: &Rendering<'_>, reveal: bool) -> String {
    let mut text = format!("pod {}/{}", rendering.namespace, rendering.name);
    if let Some(container) = &rendering.container {
        text += &format!(", container {container}");
    }
    text.push('\n');
    for place in &rendering.places {
        let title = match rendering.container {
            Some(_) => format!("/{}  {} {}", place.path, place.kind, place.volume),
            None => format!("{}  {}", place.path, place.kind),
        };
        match &place.content {
            RenderedContent::Entries(entries) => {
                text += &format!("\n{title}\n");
                let width = entries.iter().map(|entry| owner(entry).len()).max().unwrap_or_default();
                entries.iter().for_each(|entry| write_entry(&mut text, entry, width, reveal));
            }
            RenderedContent::OfNode(line) => text += &format!("\n{title}: {line}\n"),
            RenderedContent::Waiting(reason) => text += &format!("\n{title} waits: {reason}\n"),
        }
    }
    text
}

fn owner(entry: &RenderedEntry<'_>) -> String {
    format!("{}:{}", entry.uid, entry.gid)
}

fn write_entry(text: &mut String, entry: &RenderedEntry<'_>, width: usize, reveal: bool) {
    let depth = if entry.path.is_empty() { 0 } else { entry.path.matches('/').count() };
    let indent = "  ".repeat(depth);
    let name = match entry.path.rsplit('/').next() {
        None | Some("") => ".",
        Some(name) => name,
    };
    let size = entry.kind.size().map(|size| size.to_string()).unwrap_or_default();
    let front = format!("  {}  {:<width$}  {size:>8}  {indent}", mode(entry), owner(entry));
    let margin = " ".repeat(front.chars().count());
    let _always_fits = match &entry.kind {
        EntryKind::Directory => writeln!(text, "{front}{name}/"),
        EntryKind::Link(target) => writeln!(text, "{front}{name} -> {target}"),
        EntryKind::File { content, is_secret } => match visible(content, *is_secret, reveal).map(str::from_utf8) {
            None => writeln!(text, "{front}{name}  <{} bytes>", content.len()),
            Some(Err(_)) => writeln!(text, "{front}{name}  <{} bytes, not text>", content.len()),
            Some(Ok(content)) => {
                *text += &format!("{front}{name}\n");
                write_lines(text, content, &margin);
                Ok(())
            }
        },
    };
}

fn write_lines(text: &mut String, content: &str, margin: &str) {
    for line in content.lines().take(MAX_LINES) {
        *text += &format!("{margin}| {line}\n");
    }
    match content.lines().count() {
        count if count > MAX_LINES => *text += &format!("{margin}  and {} more lines\n", count - MAX_LINES),
        _ => {}
    }
}

/// `drwxr-sr-x`, as `ls -l` writes it.
pub fn mode(entry: &RenderedEntry<'_>) -> String {
    let kind = match entry.kind {
        EntryKind::Directory => 'd',
        EntryKind::Link(_) => 'l',
        EntryKind::File { .. } => '-',
    };
    let mode = entry.mode;
    let special = [(0o4000, 's', 'S'), (0o2000, 's', 'S'), (0o1000, 't', 'T')];
    let mut text = String::from(kind);
    for (class, (bit, with, without)) in special.into_iter().enumerate() {
        let bits = mode >> (6 - 3 * class);
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & bit != 0, bits & 1 != 0) {
            (true, true) => with,
            (true, false) => without,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_written_as_ls_does() {
        let entry = |mode, kind| RenderedEntry { path: String::new(), mode, uid: 0, gid: 0, kind };
        assert_eq!(mode(&entry(0o2755, EntryKind::Directory)), "drwxr-sr-x");
        assert_eq!(mode(&entry(0o3777, EntryKind::Directory)), "drwxrwsrwt");
        assert_eq!(mode(&entry(0o777, EntryKind::Link(String::new()))), "lrwxrwxrwx");
        let file = EntryKind::File { content: b""[..].into(), is_secret: false };
        assert_eq!(mode(&entry(0o6440, file)), "-r-Sr-S---");
    }
}
