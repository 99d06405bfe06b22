//! The installed file of settings. It has every key with its meaning and its default, in comments.

use clap::Command;

use super::keys::KEYS;
use super::{FILE, VARIABLE};

/// Most characters of a line.
const WIDTH: usize = 100;

/// The file's text.
pub(super) fn text(podfs: &Command) -> String {
    let about = format!(
        "The settings of podfs on this node, see podfs.toml(5). A flag wins over an environment variable, which wins over \
         this file. A pod keeps the settings that it was started with, also over podfs upgrade. --config or {VARIABLE} chooses \
         another file than {FILE}. Each line shows a default; remove its # to change it."
    );
    let mut text = commented(&about);
    for key in KEYS {
        let option = key.option(podfs);
        let help = option.get_long_help().or(option.get_help()).map(ToString::to_string).unwrap_or_default();
        let words: Vec<_> = option.get_possible_values().iter().map(|word| word.get_name().to_owned()).collect();
        let commands: Vec<_> = key.commands(podfs).map(clap::Command::get_name).collect();
        text.push('\n');
        text += &commented(&format!("{help}."));
        if option.get_action().takes_values() && !words.is_empty() {
            text += &commented(&format!("One of: {}.", words.join(", ")));
        }
        text += &commented(&format!("Environment: {}. Commands: {}.", key.variable, commands.join(", ")));
        text += &format!("#{} = {}\n", key.name, key.example(podfs));
    }
    text
}

/// Lines of a comment.
fn commented(text: &str) -> String {
    let mut lines = vec!["#".to_owned()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a first line");
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("# {word}"));
        } else {
            *line += " ";
            *line += word;
        }
    }
    lines.join("\n") + "\n"
}
