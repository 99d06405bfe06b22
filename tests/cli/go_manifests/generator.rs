//! Random manifests: ConfigMaps and Secrets with the ways to write a value that YAML has.

use fastrand::Rng;

/// Scalars without quotes, as YAML 1.1 and 1.2 have them; many mean something else than they seem to.
const PLAIN: &[&str] = &[
    "yes",
    "no",
    "on",
    "off",
    "y",
    "n",
    "Yes",
    "NO",
    "On",
    "true",
    "True",
    "TRUE",
    "false",
    "~",
    "null",
    "Null",
    "NULL",
    "0",
    "-0",
    "+1",
    "007",
    "0123",
    "0o17",
    "0x1F",
    "0b11",
    "1_000",
    "089",
    "1e3",
    "1.5",
    ".5",
    "5.",
    "1.50",
    "-1.5e-3",
    ".inf",
    "-.inf",
    ".NaN",
    "1:30",
    "190:20:30",
    "2001-01-01",
    "2001-01-01T00:00:00Z",
    "=",
    "a",
    "a b",
    "a:b",
    "a#b",
    "a #b",
    "-a",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "0x",
    "1.2.3",
    "1e",
    "e1",
    "0.1",
    "1.0",
    "100000000000000000000",
    "!!str 1",
    "!!int \"3\"",
    "!!str yes",
    "!!float 1",
    "<<x",
    "é",
    "\u{1f600}",
];
const QUOTED: &[&str] = &[
    "''",
    "'yes'",
    "'it''s'",
    "\"a\\nb\"",
    "\"\\x41\\u00e9\"",
    "\"\\U0001f600\"",
    "\"1\"",
    "'0123'",
    "\"a\\\n    b\"",
    "'a\n\n    b'",
    "\"\\t\\\"\\\\\"",
];
const KEYS: &[&str] = &[
    "a",
    "b",
    "c",
    "d.e",
    "f-g",
    "on",
    "yes",
    "1",
    "0123",
    "1.50",
    "1e3",
    "'q'",
    "\"r\"",
    "x y",
    "true",
    "2001-01-01",
    "0x10",
];
const BASE64: &[&str] = &["", "YQ==", "YR==", "YWI=", "YWL=", "YWJj", "YQ", "YQ=", "Y*==", "YWJj\\n", " YQ=="];

/// One text of one or more documents.
pub fn manifest(random: &mut Rng) -> String {
    let mut text = String::new();
    if random.u8(..10) == 0 {
        text += ["\u{feff}", "---\n", "# comment\n", "\n"][random.usize(..4)];
    }
    for number in 0..[1, 1, 1, 2, 3][random.usize(..5)] {
        if number > 0 {
            text +=
                ["---\n", "--- \n", "---\n# comment\n", "---\n\n", "---\n---\n", "---\n\u{feff}"][random.usize(..6)];
        }
        text += &document(random);
    }
    if random.u8(..20) == 0 { text.replace('\n', "\r\n") } else { text }
}

fn document(random: &mut Rng) -> String {
    let kind = ["ConfigMap", "Secret", "Pod"][random.usize(..3)];
    let mut text = format!("apiVersion: v1\nkind: {kind}\nmetadata:\n  name: o\n");
    match kind {
        "ConfigMap" | "Secret" => {
            text += "data:\n";
            let mut keys = KEYS.to_vec();
            random.shuffle(&mut keys);
            for key in keys.iter().take(random.usize(..4)) {
                let value = match kind {
                    "Secret" => format!("\"{}\"", BASE64[random.usize(..BASE64.len())]),
                    _ => text_value(random, 2),
                };
                text += &format!("  {key}: {value}\n");
            }
        }
        _ => text += &format!("spec:{}", block(random, 2, 4)),
    }
    text + &format!("extra:{}", block(random, 2, 4))
}

/// A scalar that is mostly a text.
fn text_value(random: &mut Rng, indent: usize) -> String {
    let pad = " ".repeat(indent + 2);
    match random.u8(..8) {
        0 => format!("|\n{pad}line 1\n{pad}  line 2\n\n{pad}line 4"),
        1 => format!(">-\n{pad}folded\n{pad}text\n\n{pad}  more"),
        2 => format!("|+\n{pad}kept\n\n"),
        3 => format!("|2-\n{pad} indented"),
        4 => format!("plain text\n{pad}of two lines"),
        5 => PLAIN[random.usize(..PLAIN.len())].to_owned(),
        _ => QUOTED[random.usize(..QUOTED.len())].to_owned(),
    }
}

fn scalar(random: &mut Rng) -> String {
    if random.u8(..3) == 0 { QUOTED[random.usize(..QUOTED.len() - 3)] } else { PLAIN[random.usize(..PLAIN.len())] }
        .to_owned()
}

/// A value behind `key:`, with the line break at its end.
fn block(random: &mut Rng, indent: usize, depth: usize) -> String {
    let pad = " ".repeat(indent);
    match random.u8(..9) {
        0..3 if depth > 0 => {
            let mut keys = KEYS.to_vec();
            random.shuffle(&mut keys);
            let mut text = String::from("\n");
            for key in keys.iter().take(random.usize(1..4)) {
                text += &format!("{pad}{key}:{}", block(random, indent + 2, depth - 1));
            }
            if random.u8(..4) == 0 {
                text += &format!("{pad}anchored: &n{indent} {{a: 1, z: {}}}\n", scalar(random));
                text += &format!("{pad}merged: {{a: 2, <<: *n{indent}, b: 3}}\n{pad}alias: *n{indent}\n");
            }
            text
        }
        3 | 4 if depth > 0 => {
            let items = (0..random.usize(1..4)).map(|_| {
                if random.bool() {
                    format!("{pad}- {}\n", scalar(random))
                } else {
                    format!("{pad}- k: {}\n{pad}  l:{}", scalar(random), block(random, indent + 4, depth - 1))
                }
            });
            format!("\n{}", items.collect::<String>())
        }
        5 => format!(" {}\n", flow(random, depth)),
        6 => format!(" {}\n", text_value(random, indent)),
        7 => format!(" {} # comment\n", scalar(random)),
        _ => format!(" {}\n", scalar(random)),
    }
}

fn flow(random: &mut Rng, depth: usize) -> String {
    if depth == 0 {
        return scalar(random);
    }
    let mut inner = || flow(random, depth - 1);
    let (one, other) = (inner(), inner());
    match random.u8(..5) {
        0 => format!("[{one}, {other}]"),
        1 => format!("{{a: {one}, b: {other}}}"),
        2 => "[]".to_owned(),
        3 => format!("{{\"a\": {one}}}"),
        _ => format!("{{{}: {one}}}", KEYS[random.usize(..KEYS.len())]),
    }
}
