//! Links in the documentation lead somewhere, and the book has every page.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::packages::top;

/// Every page of the documentation.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for directory in ["", ".github", "docs", "docs/user", "docs/reference", "docs/design", "packaging"] {
        let entries = fs::read_dir(top().join(directory)).expect(directory);
        pages.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() > 30, "these are not all: {pages:?}");
    pages
}

/// A page without its blocks of code.
fn prose(page: &Path) -> String {
    let text = fs::read_to_string(page).expect("a page");
    text.split("```").step_by(2).collect()
}

/// The targets of a page's links.
fn links(prose: &str) -> impl Iterator<Item = &str> {
    prose.split("](").skip(1).filter_map(|text| text.split([')', ' ']).next())
}

/// The anchors of a page: its headings as GitHub and mdBook write them.
fn anchors(page: &Path) -> BTreeSet<String> {
    let prose = prose(page);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|letter| letter.is_alphanumeric() || "-_ ".contains(*letter));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[test]
fn every_relative_link_leads_to_a_page_and_a_heading_that_exist() {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages() {
        for link in links(&prose(&page)).filter(|link| !link.contains("://")) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
            let leads = target.exists() && (anchor.is_empty() || anchors(&target).contains(anchor));
            if !leads {
                broken.push(format!("{}: {link}", page.strip_prefix(top()).expect("below").display()));
            }
        }
    }
    assert!(count > 60, "these are not all: {count}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_book_has_every_page_of_docs() {
    let summary = fs::read_to_string(top().join("docs/SUMMARY.md")).expect("a summary");
    let listed: BTreeSet<_> = links(&summary).map(|link| top().join("docs").join(link)).collect();
    let pages =
        pages().into_iter().filter(|page| page.starts_with(top().join("docs")) && !page.ends_with("SUMMARY.md"));
    assert_eq!(listed, pages.collect());
}

#[test]
fn the_readme_and_the_map_are_short() {
    for (page, most) in [("README.md", 10_000), ("ARCHITECTURE.md", 14_000)] {
        let bytes = fs::read(top().join(page)).expect("a page").len();
        assert!(bytes <= most, "{page} has {bytes} bytes, {most} at most: move something to docs/");
    }
}
