//! The images that `packaging/image/build` makes. This module reads them as a container runtime does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use super::container::blob_path;
use crate::common::packages::{packages, stdout_of, top};
use crate::installed::versions::Versions;

/// An image, unpacked to an OCI image layout.
pub struct Image {
    layout: PathBuf,
    /// The digest of the image, as the script prints it.
    pub digest: String,
}

/// The image of this tree's package, and the image of a later package. `None` if the packages of Debian cannot be
/// downloaded.
pub fn images() -> Option<&'static [Image; 2]> {
    static IMAGES: LazyLock<Option<[Image; 2]>> = LazyLock::new(|| {
        debian()?;
        let versions = Versions::get();
        Some([Image::build("first", &packages().deb), Image::build("second", &versions.second())])
    });
    IMAGES.as_ref()
}

/// The archive of the first image, from [`images`].
pub fn archive() -> PathBuf {
    work_path("first").with_extension("oci.tar")
}

/// The directory with the packages of Debian for images, which the first run downloads.
fn debian() -> Option<PathBuf> {
    let directory = work_path("debian");
    if !directory.exists() {
        let new = work_path("debian.new");
        let _ = fs::remove_dir_all(&new);
        fs::create_dir_all(&new).expect("a directory");
        let mut fetch = Command::new("apt-get");
        fetch.args(["download", "-qq", "-o", "APT::Sandbox::User=root", "libc6", "libgcc-s1"]).current_dir(&new);
        if !fetch.status().is_ok_and(|status| status.success()) {
            return None;
        }
        fs::rename(new, &directory).expect("renamed");
    }
    Some(directory)
}

fn work_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("image").join(name)
}

impl Image {
    pub fn build(name: &str, package: &Path) -> Image {
        let archive = work_path(name).with_extension("oci.tar");
        let mut build = Command::new(top().join("packaging/image/build"));
        build.arg("--package").arg(package).arg("--output").arg(&archive).arg("--debian").arg(work_path("debian"));
        let output = stdout_of(&mut build);
        let digest = output.lines().nth(1).expect("the digest").to_owned();
        let layout = work_path(name);
        let _ = fs::remove_dir_all(&layout);
        fs::create_dir_all(&layout).expect("a directory");
        stdout_of(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(&layout));
        Image { layout, digest }
    }

    fn json(&self, path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
            .expect("JSON")
    }

    pub fn index(&self) -> Value {
        self.json(&self.layout.join("index.json"))
    }

    pub fn manifest(&self) -> Value {
        let digest = self.index()["manifests"][0]["digest"].as_str().expect("a digest").to_owned();
        self.json(&blob_path(&self.layout, &digest))
    }

    pub fn config(&self) -> Value {
        let digest = self.manifest()["config"]["digest"].as_str().expect("a digest").to_owned();
        self.json(&blob_path(&self.layout, &digest))
    }

    pub fn layers(&self) -> Vec<PathBuf> {
        let manifest = self.manifest();
        let layers = manifest["layers"].as_array().expect("layers").iter();
        layers.map(|layer| blob_path(&self.layout, layer["digest"].as_str().expect("a digest"))).collect()
    }

    pub fn entry_point(&self) -> Vec<String> {
        words(&self.config()["config"]["Entrypoint"])
    }

    pub fn environment(&self) -> Vec<String> {
        words(&self.config()["config"]["Env"])
    }

    /// The descriptors in the index and the manifest, which have sizes and digests of blobs, and the paths of these
    /// blobs.
    pub fn blobs(&self) -> Vec<(Value, PathBuf)> {
        let (index, manifest) = (self.index(), self.manifest());
        let layers = manifest["layers"].as_array().expect("layers").iter();
        let descriptors = [&index["manifests"][0], &manifest["config"]].into_iter().chain(layers);
        descriptors
            .map(|descriptor| {
                (descriptor.clone(), blob_path(&self.layout, descriptor["digest"].as_str().expect("a digest")))
            })
            .collect()
    }
}

fn words(value: &Value) -> Vec<String> {
    value.as_array().expect("words").iter().map(|word| word.as_str().expect("a word").to_owned()).collect()
}
