//! The imports between the modules of one folder, as the source has them: after `crate::` and after `super::`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::packages::top;
use crate::manual::source::sources;

/// A folder of modules: a crate's, or one in it.
#[derive(Clone)]
pub struct Folder {
    /// The source folder of the crate.
    root: PathBuf,
    /// The path of this folder in the crate.
    path: Vec<String>,
}

/// A path in a source file that leads from one module of a folder into another one.
#[derive(Debug)]
#[expect(dead_code, reason = "the file is for the reader of a failure")]
pub struct Import {
    pub from: String,
    pub to: String,
    file: PathBuf,
}

/// A path in a source file, from the root of the crate, and the name by which the file knows it.
struct NamedPath {
    path: Vec<String>,
    name: String,
}

impl Folder {
    pub fn of_crate(root: &str) -> Folder {
        Folder::in_crate(root, &[])
    }

    pub fn in_crate(root: &str, path: &[&str]) -> Folder {
        Folder { root: top().join(root), path: path.iter().map(|part| (*part).to_owned()).collect() }
    }

    /// The folders below this folder, at all depths.
    pub fn folders(self) -> Vec<Folder> {
        let path = |name| self.path.iter().cloned().chain([name]).collect();
        let inside = |name| Folder { root: self.root.clone(), path: path(name) };
        let with_deeper = |folder: Folder| [folder.clone()].into_iter().chain(folder.folders());
        self.directories().into_iter().map(inside).flat_map(with_deeper).collect()
    }

    pub fn name(&self) -> String {
        self.directory().strip_prefix(top()).expect("below").display().to_string()
    }

    /// The imports of the folder's modules from each other, without the imports of tests.
    pub fn imports(&self) -> Vec<Import> {
        let (modules, exports) = (self.modules(), self.exports());
        let mut imports = Vec::new();
        for file in sources(&self.directory()) {
            let path = module_path(&self.root, &file);
            let own = file.strip_prefix(self.directory()).expect("below").iter().next().expect("a name");
            let from = own.to_str().expect("text").trim_end_matches(".rs").to_owned();
            for NamedPath { path: import, .. } in paths(&fs::read_to_string(&file).expect("a source"), &path) {
                let Some(to) = import.strip_prefix(self.path.as_slice()).and_then(<[String]>::first) else { continue };
                // A name that is no module, and that no module exports, belongs to the folder itself.
                let to = if modules.contains(to) { Some(to) } else { exports.get(to) };
                let file = file.strip_prefix(top()).expect("below").to_owned();
                imports.extend(to.map(|to| Import { from: from.clone(), to: to.clone(), file }));
            }
        }
        // `mod.rs` is above the modules, and may import them all.
        imports.retain(|import| import.from != "mod");
        imports
    }

    /// The circles in which the folder's modules import each other: the modules of each circle, sorted.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for Import { from, to, .. } in self.imports() {
            if from != to {
                edges.entry(from).or_default().insert(to);
            }
        }
        let reached: BTreeMap<_, _> = edges.keys().map(|module| (module, reachable(module, &edges))).collect();
        let leads = |from: &String, to: &String| reached.get(from).is_some_and(|reached| reached.contains(to));
        let in_circles = edges.keys().filter(|module| leads(module, module));
        let circle_of =
            |module| edges.keys().filter(|other| leads(module, other) && leads(other, module)).cloned().collect();
        in_circles.map(circle_of).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn directory(&self) -> PathBuf {
        self.path.iter().fold(self.root.clone(), |directory, part| directory.join(part))
    }

    fn directories(&self) -> BTreeSet<String> {
        let is_of_tests = |name: &String| name == "tests";
        entries(&self.directory())
            .filter(|(path, name)| path.is_dir() && !is_of_tests(name))
            .map(|(_, name)| name)
            .collect()
    }

    fn modules(&self) -> BTreeSet<String> {
        entries(&self.directory()).map(|(_, name)| name.trim_end_matches(".rs").to_owned()).collect()
    }

    /// The names that the folder exports from its modules, each with its module.
    fn exports(&self) -> BTreeMap<String, String> {
        let name = if self.path.is_empty() { "lib.rs" } else { "mod.rs" };
        let Ok(text) = fs::read_to_string(self.directory().join(name)) else { return BTreeMap::new() };
        let modules = self.modules();
        let mut exports = BTreeMap::new();
        let code = code(&text);
        for statement in code.split(';').map(str::trim_start) {
            let Some((visibility, used)) = statement.split_once("use ") else { continue };
            if !visibility.is_empty() && !visibility.starts_with("pub") || visibility.contains(['{', '\n']) {
                continue;
            }
            let mut paths = Vec::new();
            expand(used.strip_prefix("self::").unwrap_or(used), Vec::new(), &mut paths);
            for NamedPath { path, name } in paths {
                if path.len() > 1 && modules.contains(&path[0]) {
                    exports.insert(name, path[0].clone());
                }
            }
        }
        exports
    }
}

/// The modules that a module imports, and those that these import, and so on.
fn reachable(module: &str, edges: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut pending = vec![module];
    while let Some(module) = pending.pop() {
        let imports = edges.get(module).into_iter().flatten();
        pending.extend(imports.filter(|import| reached.insert((*import).clone())).map(String::as_str));
    }
    reached
}

fn entries(directory: &Path) -> impl Iterator<Item = (PathBuf, String)> {
    let paths = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    paths.map(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).expect("text").to_owned();
        (path, name)
    })
}

/// The path of the module that a source file is.
fn module_path(root: &Path, file: &Path) -> Vec<String> {
    let inside = file.strip_prefix(root).expect("a file in it").with_extension("");
    let mut path: Vec<String> = inside.iter().map(|part| part.to_str().expect("text").to_owned()).collect();
    path.pop_if(|last| last == "mod" || last == "lib" || last == "main");
    path
}

/// A source without its comments and its tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(|line| [line, "\n"]).collect()
}

/// The paths in the source of a module that begin with `crate::` or `super::`.
fn paths(text: &str, module: &[String]) -> Vec<NamedPath> {
    let code = code(text);
    let mut paths = Vec::new();
    for word in ["crate::", "super::"] {
        for (place, _) in code.match_indices(word) {
            let is_first = !code[..place].ends_with(|last: char| last.is_alphanumeric() || last == '_' || last == ':');
            if is_first {
                let base = if word == "crate::" { Vec::new() } else { module.to_vec() };
                expand(&code[place..], base, &mut paths);
            }
        }
    }
    paths
}

/// Adds the paths of a tree such as `super::a::{B, c::D as E}`, which begins the text. Returns the text after the tree.
fn expand<'a>(mut rest: &'a str, mut base: Vec<String>, paths: &mut Vec<NamedPath>) -> &'a str {
    loop {
        if let Some(list) = rest.strip_prefix('{') {
            rest = list;
            loop {
                rest = rest.trim_start_matches([' ', '\n', ',']);
                if let Some(rest) = rest.strip_prefix('}') {
                    return rest;
                }
                let before = rest.len();
                rest = expand(rest, base.clone(), paths);
                assert!(rest.len() < before, "no list of paths: {}", rest.lines().next().unwrap_or_default());
            }
        }
        let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
        let (name, mut after) = rest.split_at(end);
        match name {
            "crate" | "self" | "" => {}
            "super" => drop(base.pop()),
            _ => base.push(name.to_owned()),
        }
        if let Some(deeper) = after.strip_prefix("::") {
            rest = deeper;
            continue;
        }
        if name.is_empty() && after.starts_with('*') {
            after = &after[1..];
        }
        let mut known_as = base.last().cloned().unwrap_or_default();
        if let Some(renamed) = after.strip_prefix(" as ") {
            let end = renamed.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(renamed.len());
            (known_as, after) = (renamed[..end].to_owned(), &renamed[end..]);
        }
        paths.push(NamedPath { path: base, name: known_as });
        return after;
    }
}

#[test]
fn paths_are_read_from_lists_and_relative_to_their_module() {
    let text = "use super::super::a::{B, c::{D as E, self}};\nfn f() { crate::g::h::<u8>(1) }\n//! super::i::j\n";
    let module = ["x", "y", "z"].map(str::to_owned);
    let names: Vec<_> = paths(text, &module).iter().map(|named| (named.path.join("::"), named.name.clone())).collect();
    let expected = [("g::h", "h"), ("x::a::B", "B"), ("x::a::c::D", "E"), ("x::a::c", "c")]
        .map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(names, expected);
}
