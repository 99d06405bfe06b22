//! The mount options of a device: podfs translates the words of mount(8) to the kernel's flags and parameters.

use rustix::mount::MountAttrFlags;

use crate::host::HostError;
use crate::types::{has_open_quote, mount_options};

/// Mount options, by the system call that takes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceMountOptions {
    /// The mount is read-only.
    pub(super) read_only: bool,
    /// The attributes of the mount: restrictions and access times (`fsmount(2)`).
    pub(super) attributes: MountAttrFlags,
    /// The parameters of the file system (`fsconfig(2)`): flags, and keys with a value.
    pub(super) parameters: Vec<(String, Option<String>)>,
}

impl Default for DeviceMountOptions {
    fn default() -> DeviceMountOptions {
        DeviceMountOptions { read_only: false, attributes: MountAttrFlags::empty(), parameters: Vec::new() }
    }
}

impl DeviceMountOptions {
    /// Parses a list of options. An entry may have several options, with commas between them. If two options exclude each other,
    /// the last one counts.
    ///
    /// # Errors
    /// When an option has a quote without an end.
    pub(super) fn parse(list: &[String]) -> Result<DeviceMountOptions, HostError> {
        let mut options = DeviceMountOptions::default();
        for word in list.iter().flat_map(|entry| mount_options(entry)) {
            if has_open_quote(word) {
                return Err(HostError::Refused(format!(
                    "mount option {word:?} has a quote without an end; correct it"
                )));
            }
            options.add(word);
        }
        Ok(options)
    }

    /// Adds one option.
    fn add(&mut self, word: &str) {
        let flag = |attributes: &mut MountAttrFlags, flag, set| attributes.set(flag, set);
        match word {
            "rw" => self.read_only = false,
            "ro" => self.read_only = true,
            // Options that only mount(8) uses, or that are the kernel's defaults.
            "" | "defaults" | "bind" | "auto" | "noauto" | "nofail" | "_netdev" | "async" | "relatime" | "user"
            | "nouser" | "users" | "norelatime" => {}
            "nosuid" | "suid" => flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_NOSUID, word == "nosuid"),
            "nodev" | "dev" => flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_NODEV, word == "nodev"),
            "noexec" | "exec" => flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_NOEXEC, word == "noexec"),
            "noatime" | "atime" => flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_NOATIME, word == "noatime"),
            "strictatime" | "nostrictatime" => {
                flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_STRICTATIME, word == "strictatime")
            }
            "nodiratime" | "diratime" => {
                flag(&mut self.attributes, MountAttrFlags::MOUNT_ATTR_NODIRATIME, word == "nodiratime")
            }
            word if word.starts_with("x-") || word.starts_with("comment=") => {}
            word => {
                let (key, value) = word.split_once('=').map_or((word, None), |(key, value)| (key, Some(value)));
                let value = value.map(|value| value.trim_matches('"').to_owned());
                self.parameters.push((key.to_owned(), value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &[&str]) -> DeviceMountOptions {
        DeviceMountOptions::parse(&list.iter().map(|&word| word.to_owned()).collect::<Vec<_>>()).expect("options")
    }

    #[test]
    fn options_go_to_the_call_that_takes_them() {
        let options = parse(&["ro,noatime", "data=ordered", "discard", "_netdev", "x-systemd.automount", "nosuid"]);
        assert!(options.read_only);
        assert_eq!(options.attributes, MountAttrFlags::MOUNT_ATTR_NOATIME | MountAttrFlags::MOUNT_ATTR_NOSUID);
        let parameter = |key: &str, value: Option<&str>| (key.to_owned(), value.map(str::to_owned));
        assert_eq!(options.parameters, [parameter("data", Some("ordered")), parameter("discard", None)]);
    }

    #[test]
    fn the_last_of_two_options_counts_and_quotes_keep_commas() {
        assert_eq!(parse(&["ro", "rw", "nodev", "dev", ""]), DeviceMountOptions::default());
        let options = parse(&["context=\"system_u:object_r:tmp_t:s0:c1,c2\""]);
        let value = Some("system_u:object_r:tmp_t:s0:c1,c2".to_owned());
        assert_eq!(options.parameters, [("context".to_owned(), value)]);
        assert!(DeviceMountOptions::parse(&["context=\"open".to_owned()]).is_err());
    }
}
