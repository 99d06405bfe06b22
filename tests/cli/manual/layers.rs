//! ARCHITECTURE's "arrows point down": a module imports only modules of the layers below its own.

use std::fs;
use std::path::Path;

use crate::common::packages::top;
use crate::manual::source::sources;

/// The modules of podfs, layer by layer, the lowest first. Modules of one layer do not import each other.
const LAYERS: [&[&str]; 9] = [
    &["types"],
    &["volume"],
    &["manifest"],
    &["binding", "kube", "metrics", "payload"],
    &["host", "source"],
    &["supervisor"],
    &["admin"],
    &["cli"],
    &["bin", "lib", "main"],
];

fn layer(module: &str) -> usize {
    let layer = LAYERS.iter().position(|modules| modules.contains(&module));
    layer.unwrap_or_else(|| panic!("src/{module} has no layer: give it one here and in ARCHITECTURE.md"))
}

/// The folder or file in `src` that a source file belongs to.
fn module_of(file: &Path) -> String {
    let inside = file.strip_prefix(top().join("src")).expect("a file in src");
    let first = inside.iter().next().expect("a name").to_str().expect("text");
    first.trim_end_matches(".rs").to_owned()
}

/// The modules of podfs that a text names after `crate::`. A list of them in braces would be missed, and fails.
fn imports(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = lines.flat_map(|line| line.split("crate::").skip(1));
    after
        .map(|rest| {
            assert!(!rest.starts_with('{'), "name one module after `crate::`, not a list: {rest}");
            rest.split(|letter: char| !letter.is_ascii_lowercase() && letter != '_').next().unwrap_or_default()
        })
        .filter(|module| !module.is_empty())
        .collect()
}

#[test]
fn modules_import_only_what_lies_below_them() {
    let mut upwards = Vec::new();
    let mut seen = 0;
    for file in sources(&top().join("src")) {
        let module = module_of(&file);
        for import in imports(&fs::read_to_string(&file).expect("a source")) {
            seen += 1;
            if import != module && layer(import) >= layer(&module) {
                upwards.push(format!("{} imports {import}", file.strip_prefix(top()).expect("below").display()));
            }
        }
    }
    assert!(seen > 200, "these are not all: {seen}");
    assert!(upwards.is_empty(), "these imports do not point down: {upwards:#?}");
}
