//! The settings of a node.

use clap::{Arg, Command};

/// A setting: an option that an operator may decide once for a node.
pub(in crate::cli) struct Key {
    /// Its name in the file, and as an option.
    pub(in crate::cli) name: &'static str,
    /// Its name in the environment.
    pub(in crate::cli) variable: &'static str,
}

/// All settings. A setting has the type, meaning and default of its option, and applies to every command with that option.
/// Options about one pod are not settings, nor are options that only one pod of a node can have, such as an address to listen
/// on.
pub(in crate::cli) const KEYS: &[Key] = &[
    Key { name: "root-dir", variable: "PODFS_ROOT_DIR" },
    Key { name: "run-dir", variable: "PODFS_RUN_DIR" },
    Key { name: "kubeconfig", variable: "PODFS_KUBECONFIG" },
    Key { name: "in-cluster", variable: "PODFS_IN_CLUSTER" },
    Key { name: "node-name", variable: "PODFS_NODE_NAME" },
    Key { name: "csi", variable: "PODFS_CSI" },
    Key { name: "nri", variable: "PODFS_NRI" },
    Key { name: "nri-pods", variable: "PODFS_NRI_PODS" },
    Key { name: "nri-index", variable: "PODFS_NRI_INDEX" },
    Key { name: "kubelet-root", variable: "PODFS_KUBELET_ROOT" },
    Key { name: "csi-allow", variable: "PODFS_CSI_ALLOW" },
    Key { name: "csi-read-as", variable: "PODFS_CSI_READ_AS" },
    Key { name: "discover", variable: "PODFS_DISCOVER" },
    Key { name: "release-when-gone", variable: "PODFS_RELEASE_WHEN_GONE" },
    Key { name: "report-volumes-in-use", variable: "PODFS_REPORT_VOLUMES_IN_USE" },
    Key { name: "register-csi-drivers", variable: "PODFS_REGISTER_CSI_DRIVERS" },
    Key { name: "server-memory-max", variable: "PODFS_SERVER_MEMORY_MAX" },
    Key { name: "keep-old-generations", variable: "PODFS_KEEP_OLD_GENERATIONS" },
    Key { name: "flexvolume-dir", variable: "PODFS_FLEXVOLUME_DIR" },
    Key { name: "sub-path", variable: "PODFS_SUB_PATH" },
    Key { name: "io-uring", variable: "PODFS_IO_URING" },
    Key { name: "log", variable: "RUST_LOG" },
    Key { name: "log-format", variable: "PODFS_LOG_FORMAT" },
];

impl Key {
    /// The setting's option, if this command has it.
    pub(in crate::cli) fn of<'a>(&self, command: &'a Command) -> Option<&'a Arg> {
        command.get_arguments().find(|argument| argument.get_long() == Some(self.name))
    }

    /// The commands with the setting's option.
    pub(in crate::cli) fn commands<'a>(&self, podfs: &'a Command) -> impl Iterator<Item = &'a Command> {
        visible(podfs).filter(|command| self.of(command).is_some())
    }

    /// The setting's option, from the first command that has it.
    pub(in crate::cli) fn option<'a>(&self, podfs: &'a Command) -> &'a Arg {
        visible(podfs).find_map(|command| self.of(command)).expect("every key is the name of an option")
    }

    /// Whether the setting has a value if neither the environment nor the file sets one.
    pub(in crate::cli) fn has_default(&self, podfs: &Command) -> bool {
        let option = self.option(podfs);
        !option.get_action().takes_values() || !option.get_default_values().is_empty()
    }

    /// A value of the setting, in TOML: its default, or a value that could stand in a file.
    pub(in crate::cli) fn sample(&self, podfs: &Command) -> String {
        if self.has_default(podfs) {
            return self.example(podfs);
        }
        let value = match self.name {
            "kubeconfig" => "/etc/kubernetes/kubelet.conf",
            "node-name" => "worker-1",
            "csi" => "/var/lib/kubelet/plugins/podfs.io/csi.sock",
            "nri" => "/var/run/nri/nri.sock",
            "csi-allow" => "/srv/data,nfs.example.com",
            "discover" => "fast=/mnt/fast",
            "server-memory-max" => "512Mi",
            _ => return self.example(podfs),
        };
        format!("{value:?}")
    }

    /// An example of the value in TOML: `false` for a flag, otherwise a string in quotes.
    pub(in crate::cli) fn example(&self, podfs: &Command) -> String {
        let option = self.option(podfs);
        if !option.get_action().takes_values() {
            return "false".to_owned();
        }
        let default = option.get_default_values().first().map(|value| value.to_string_lossy());
        let value = default.unwrap_or_else(|| option.get_value_names().unwrap_or_default().join(" ").into());
        format!("{value:?}")
    }
}

/// The commands that users call. The others do not read settings.
pub(in crate::cli) fn visible(podfs: &Command) -> impl Iterator<Item = &Command> {
    podfs.get_subcommands().filter(|command| !command.is_hide_set())
}
