//! Modules of the guest's kernel, in the order in which they can be loaded.

use std::fs;
use std::path::{Path, PathBuf};

/// Puts a module behind those that it needs, unless it is there, or a part of the kernel itself.
pub fn add(modules: &Path, name: &str, all: &mut Vec<String>) {
    if all.iter().any(|known| known == name) || is_built_in(modules, name) {
        return;
    }
    let file = find(modules, name).unwrap_or_else(|| panic!("no module {name} in {}", modules.display()));
    needs(&fs::read(file).expect("a module")).iter().for_each(|needed| add(modules, needed, all));
    all.push(name.to_owned());
}

/// The file of a module: in its name a dash and an underscore are the same.
pub fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    let is_it = |path: &Path| {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().replace('-', "_"));
        path.extension().is_some_and(|extension| extension == "ko") && stem.is_some_and(|stem| stem == name)
    };
    fs::read_dir(directory)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .find_map(|path| if path.is_dir() { find(&path, name) } else { is_it(&path).then_some(path) })
}

fn is_built_in(modules: &Path, name: &str) -> bool {
    let all = fs::read_to_string(modules.join("modules.builtin")).expect("a list");
    let stems = all.lines().filter_map(|path| Path::new(path).file_stem());
    stems.map(|stem| stem.to_string_lossy().replace('-', "_")).any(|stem| stem == name)
}

/// The modules that a module needs, as it says itself (`depends=a,b`, between zeros).
fn needs(module: &[u8]) -> Vec<String> {
    let fields = module.split(|byte| *byte == 0);
    let depends = fields.filter_map(|field| field.strip_prefix(b"depends=")).next().unwrap_or_default();
    let names = String::from_utf8_lossy(depends).replace('-', "_");
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
