//! One manual page.

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use crate::cli::config::keys::{KEYS, visible};
use crate::cli::config::{FILE, VARIABLE};

/// The date of the last complete review of the pages.
const DATE: &str = "2026-11-21";
const MANUAL: &str = "podfs manual";
/// The pages in `packaging/man`, and that of the settings.
const OTHER_PAGES: [&str; 4] = ["podfs(8)", "podfs.toml(5)", "podfs-pod(5)", "podfs-agent(7)"];

/// The name of a command's page.
pub(super) fn name(command: &Command) -> String {
    format!("podfs-{}.8", command.get_name())
}

/// The page of a command: its help, environment variables and files.
pub(super) fn of_command(command: &Command, podfs: &Command) -> String {
    let title = format!("podfs-{}", command.get_name());
    let man =
        Man::new(command.clone()).title(title.to_uppercase()).section("8").date(DATE).source(source()).manual(MANUAL);
    let mut text = Vec::new();
    man.render_title(&mut text)
        .and_then(|()| man.render_name_section(&mut text))
        .and_then(|()| man.render_synopsis_section(&mut text))
        .and_then(|()| man.render_description_section(&mut text))
        .and_then(|()| man.render_options_section(&mut text))
        .expect("memory takes everything");
    let mut roff = Roff::new();
    commands(&mut roff, command);
    if let Some(help) = command.get_after_help() {
        sections(&mut roff, &help.to_string());
    }
    if command.get_name() == "config" || KEYS.iter().any(|key| key.of(command).is_some()) {
        environment(&mut roff, command);
        files(&mut roff, command);
    }
    see_also(&mut roff, &title, podfs);
    tidy(&(String::from_utf8_lossy(&text) + roff.to_roff().as_str()))
}

/// `podfs.toml(5)`.
pub(super) fn of_settings(podfs: &Command) -> String {
    let mut roff = Roff::new();
    roff.control("TH", ["PODFS.TOML", "5", DATE, &source(), MANUAL]);
    roff.control("SH", ["NAME"]).text([roman("podfs.toml - settings of podfs on this node")]);
    roff.control("SH", ["SYNOPSIS"]).text([italic(FILE)]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(
        "What an operator decides once for a node. The file is TOML without tables: one line for each setting, NAME = VALUE. \
         Strings are in quotes, flags are true or false, paths are absolute. A setting has the name, the meaning, the default \
         and the checks of the option that it stands for, and applies to every command that has the option.",
    )]);
    roff.control("PP", []);
    roff.text([roman(
        "A flag wins over the environment, which wins over the file, which wins over the default. A setting that conflicts \
         with what wins is left out: podfs run --push takes no objects from an API server, whatever the file says. An empty \
         variable counts as none.",
    )]);
    roff.control("PP", []);
    roff.text([roman(
        "A key that podfs does not know, or a value that it cannot use, ends every command that reads the file with exit status \
         2 and one sentence, which names the line. The file need not exist, unless --config or ",
    ), bold(VARIABLE), roman(" names it.")]);
    roff.control("PP", []);
    roff.text([roman(
        "podfs run reads the file when it starts. A pod keeps what it was started with until it is stopped, also over podfs \
         upgrade. The directories are where commands find pods, so change them when no pod is served.",
    )]);
    roff.control("SH", ["SETTINGS"]);
    for key in KEYS {
        let option = key.option(podfs);
        let help = option.get_long_help().or(option.get_help()).map(ToString::to_string).unwrap_or_default();
        let commands: Vec<_> = key.commands(podfs).map(|command| format!("podfs-{}(8)", command.get_name())).collect();
        roff.control("TP", []);
        roff.text([bold(key.name), roman(" = "), italic(key.example(podfs))]);
        roff.text([roman(help)]);
        let words: Vec<_> = option.get_possible_values().iter().map(|word| word.get_name().to_owned()).collect();
        if option.get_action().takes_values() && !words.is_empty() {
            roff.text([roman(format!("One of {}.", words.join(", ")))]);
        }
        let unset = if key.has_default(podfs) { "" } else { " Not set by default." };
        roff.text([roman("Environment: "), bold(key.variable), roman(format!(".{unset}"))]);
        roff.text([roman(format!("Used by {}.", commands.join(", ")))]);
    }
    roff.control("SH", ["FILES"]);
    roff.control("TP", []).text([italic(FILE)]).text([roman("The settings. Installed with every line commented out.")]);
    roff.control("SH", ["EXAMPLES"]);
    roff.control("EX", []);
    roff.text([roman("# The data of pods is on a disk of its own.")]);
    roff.text([roman("root-dir = \"/srv/podfs\"")]);
    roff.text([roman("kubeconfig = \"/etc/kubernetes/kubelet.conf\"")]);
    roff.text([roman("server-memory-max = \"64Mi\"")]);
    roff.control("EE", []);
    see_also(&mut roff, "podfs.toml", podfs);
    tidy(&roff.to_roff())
}

fn source() -> String {
    format!("podfs {}", env!("CARGO_PKG_VERSION"))
}

/// Adds the sections of a help text after the options. A section has a heading in capitals, then codes with their meaning, or
/// examples.
fn sections(roff: &mut Roff, help: &str) {
    let mut is_code = false;
    for line in help.lines().chain([""]) {
        match line.strip_suffix(':').filter(|_| !line.starts_with(' ')) {
            Some(heading) => {
                roff.control("SH", [heading]);
                is_code = heading == "EXAMPLES";
                if is_code {
                    roff.control("EX", []);
                }
            }
            None if line.is_empty() => {
                if is_code {
                    roff.control("EE", []);
                }
                is_code = false;
            }
            None if is_code => drop(roff.text([roman(line.trim())])),
            None => {
                let (code, meaning) = line.trim().split_once("  ").unwrap_or((line.trim(), ""));
                roff.control("TP", []).text([bold(code)]).text([roman(meaning)]);
            }
        }
    }
}

/// Adds the subcommands of a command, each with its usage, its help and its own options.
fn commands(roff: &mut Roff, command: &Command) {
    for (index, inner) in visible(command).enumerate() {
        if index == 0 {
            roff.control("SH", ["COMMANDS"]);
        }
        let help = inner.get_long_about().or(inner.get_about()).map(ToString::to_string).unwrap_or_default();
        roff.control("TP", []).text([bold(call(inner))]).text([roman(one_paragraph(&help))]);
        let own = inner.get_arguments().filter(|argument| !argument.is_global_set() && argument.get_long().is_some());
        for option in own {
            let help = option.get_long_help().or(option.get_help()).map(ToString::to_string).unwrap_or_default();
            let names = option.get_value_names().unwrap_or_default().join(" ");
            let names = if option.get_action().takes_values() { format!(" {names}") } else { String::new() };
            roff.control("RS", []);
            roff.control("TP", []).text([bold(format!("--{}{names}", option.get_long().unwrap_or_default()))]);
            roff.text([roman(one_paragraph(&help))]);
            roff.control("RE", []);
        }
    }
}

/// The usage of a subcommand, such as `wait POD`.
fn call(command: &Command) -> String {
    let places = command.get_positionals().flat_map(|place| place.get_value_names().unwrap_or_default());
    [command.get_name()].into_iter().chain(places.map(|name| name.as_str())).collect::<Vec<_>>().join(" ")
}

fn one_paragraph(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn environment(roff: &mut Roff, command: &Command) {
    roff.control("SH", ["ENVIRONMENT"]);
    let settings = KEYS.iter().filter(|key| key.of(command).is_some()).map(|key| (key.variable, key.name));
    for (variable, option) in settings.chain([(VARIABLE, "config")]) {
        roff.control("TP", []).text([bold(variable)]);
        roff.text([roman("Stands for "), bold(format!("--{option}")), roman(" where that is not given.")]);
    }
}

fn files(roff: &mut Roff, command: &Command) {
    roff.control("SH", ["FILES"]);
    roff.control("TP", []).text([italic(FILE)]).text([roman("Settings of the node, see podfs.toml(5).")]);
    let places = [
        ("root-dir", "/pods/UID/volumes", "The volumes of a pod."),
        ("run-dir", "/UID", "The lock and the sockets of a pod, until a reboot."),
    ];
    for (option, below, meaning) in places {
        let option = command.get_arguments().find(|argument| argument.get_long() == Some(option));
        for default in option.into_iter().flat_map(|option| option.get_default_values()) {
            roff.control("TP", []).text([italic(default.to_string_lossy() + below)]).text([roman(meaning)]);
        }
    }
}

fn see_also(roff: &mut Roff, own: &str, podfs: &Command) {
    let commands = visible(podfs).map(|command| format!("podfs-{}(8)", command.get_name()));
    let all = OTHER_PAGES.map(str::to_owned).into_iter().chain(commands);
    let others: Vec<_> = all.filter(|page| page.split('(').next() != Some(own)).collect();
    roff.control("SH", ["SEE ALSO"]).text([roman(others.join(", "))]);
}

/// Makes one page of pieces, each of which begins with a definition of the apostrophe.
fn tidy(text: &str) -> String {
    const APOSTROPHE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";
    let once = APOSTROPHE.to_owned() + &text.replace(APOSTROPHE, "").replace(".br\n\n.br\n", ".sp\n");
    once.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}
