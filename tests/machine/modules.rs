//! Modules of the guest's kernel, in an order in which the kernel can load them.

use std::fs;
use std::path::{Path, PathBuf};

/// Appends the dependencies of a module and then the module to `list`, unless they are in the list or built into the
/// kernel.
pub fn add(modules: &Path, name: &str, list: &mut Vec<String>) {
    if list.iter().any(|listed| listed == name) || is_built_in(modules, name) {
        return;
    }
    let file = find(modules, name).unwrap_or_else(|| panic!("no module {name} in {}", modules.display()));
    dependencies(&fs::read(file).expect("a module")).iter().for_each(|dependency| add(modules, dependency, list));
    list.push(name.to_owned());
}

/// The file of a module. A dash in the file's name stands for an underscore in the module's name.
pub fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    let is_module = |path: &Path| {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().replace('-', "_"));
        path.extension().is_some_and(|extension| extension == "ko") && stem.is_some_and(|stem| stem == name)
    };
    fs::read_dir(directory)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .find_map(|path| if path.is_dir() { find(&path, name) } else { is_module(&path).then_some(path) })
}

fn is_built_in(modules: &Path, name: &str) -> bool {
    let list = fs::read_to_string(modules.join("modules.builtin")).expect("a list");
    let stems = list.lines().filter_map(|path| Path::new(path).file_stem());
    stems.map(|stem| stem.to_string_lossy().replace('-', "_")).any(|stem| stem == name)
}

/// The modules that a module depends on. The module's file has them as `depends=a,b` between zero bytes.
fn dependencies(module: &[u8]) -> Vec<String> {
    let fields = module.split(|byte| *byte == 0);
    let depends = fields.filter_map(|field| field.strip_prefix(b"depends=")).next().unwrap_or_default();
    let names = String::from_utf8_lossy(depends).replace('-', "_");
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
