//! NFS beside other clients, against nfs-ganesha on this machine, in one run.
//!
//! `cargo bench -p podfs-fuse --bench nfs [-- raw]...` prints tables. Figures are medians of rounds that take turns. It needs
//! root and `nfs-ganesha`.
//!
//! | module | measures |
//! |---|---|
//! | [`raw`] | the client without a mount, beside `nfs3_client` |
//! | [`volume`] | programs that use a mount, beside the client without one; also with a `delayed` network |
//! | [`files`] | programs that read and write whole files, beside nfs-cat and nfs-cp; likewise |

mod files;
#[path = "../../../tests/nfs/mounted.rs"]
mod mounted;
#[path = "../../../tests/nfs_rig/mod.rs"]
mod nfs_rig;
mod peer;
mod raw;
mod rig;
mod volume;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let chosen: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let groups: [(&str, fn()); 5] = [
        ("raw", raw::run),
        ("volume", volume::run),
        ("files", files::run),
        ("delayed", volume::delayed),
        ("delayed", files::delayed),
    ];
    for (name, run) in groups {
        if chosen.is_empty() || chosen.iter().any(|group| *group == name) {
            run();
        }
    }
}
