//! The commands in the lines of a block.

/// Programs that start another one, whose command line follows theirs.
const LAUNCHERS: [&str; 10] = [
    "env", "exec", "mpirun", "nice", "nohup", "srun", "ssh", "time", "timeout", "torchrun",
];

/// Words between commands.
const SEPARATORS: [&str; 7] = ["&&", "||", "|", ";", "&", "then", "do"];

/// The commands of `megaburn` and `cargo` in a block, word by word, from the name of the program on.
/// Of a block that also shows output, `shows_output`, only lines count that begin like a command.
pub(super) fn commands(block: &str, shows_output: bool) -> Result<Vec<Vec<String>>, String> {
    let mut found = Vec::new();
    for line in block.replace("\\\n", " ").lines() {
        let line = line.trim();
        let line = line.strip_prefix("$ ").unwrap_or(line);
        let names_program = line.contains("megaburn") || line.contains("cargo");
        if !names_program || line.starts_with('#') {
            continue;
        }
        let first = line.split(' ').next().unwrap_or_default();
        if shows_output && !is_program(first) && !is_launcher(first) {
            continue;
        }
        let words = shlex::split(line).ok_or_else(|| format!("a quote has no end: {line}"))?;
        for part in words.split(|word| SEPARATORS.contains(&word.as_str())) {
            if let Some(command) = command(part)? {
                found.push(command);
            }
        }
    }
    Ok(found)
}

/// The command of `megaburn` or `cargo` in a part of a line, without redirections.
fn command(part: &[String]) -> Result<Option<Vec<String>>, String> {
    let is_variable = |word: &&String| {
        let name = word.split_once('=').map(|(name, _)| name);
        name.is_some_and(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    };
    let part = &part[part.iter().take_while(is_variable).count()..];
    let Some(first) = part.first() else {
        return Ok(None);
    };
    if first == "ssh" {
        // What is behind the host is a line of its own.
        let line = part[1..].join(" ");
        return Ok(commands(&line[line.find(' ').unwrap_or(0)..], false)?.pop());
    }
    let begin = match is_launcher(first) {
        // With a flag behind it, it is the value of a flag: `--rdzv-id megaburn --no-python`.
        true => (0..part.len()).find(|at| {
            let next = part.get(at + 1);
            is_program(&part[*at]) && !next.is_some_and(|next| next.starts_with("--"))
        }),
        false => is_program(first).then_some(0),
    };
    let Some(begin) = begin else {
        return Ok(None);
    };
    let is_redirection = |word: &String| {
        let word = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
        word.starts_with('>') || word.starts_with('<')
    };
    let words = part[begin..]
        .iter()
        .take_while(|word| !is_redirection(word));
    let words = words.filter(|word| *word != "$@" && *word != "..");
    Ok(Some(words.map(|word| without_variables(word)).collect()))
}

fn is_launcher(word: &str) -> bool {
    LAUNCHERS.contains(&word)
}

pub(super) fn is_program(word: &str) -> bool {
    word == "cargo" || word == "megaburn" || word.ends_with("/megaburn")
}

/// A word with something in the place of the shell's variables: a number, so that it can be any
/// value.
fn without_variables(word: &str) -> String {
    let mut text = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let end = match after.strip_prefix('{') {
            Some(_) => after.find('}').map_or(after.len(), |at| at + 1),
            None => after.find(|c| !is_name(c)).unwrap_or(after.len()),
        };
        // Part of a word is text.
        let is_whole = before.is_empty() && text.is_empty() && end == after.len();
        text.push_str(if is_whole { "1" } else { "x" });
        rest = &after[end..];
    }
    text.push_str(rest);
    text
}

#[test]
fn commands_of_a_block_are_found() {
    let found = |block: &str, shows_output| {
        let found = commands(block, shows_output).unwrap();
        let lines: Vec<String> = found.iter().map(|words| words.join(" ")).collect();
        lines
    };
    let script = "export PATH=x\nA=b target/release/megaburn train \\\n  --steps 3 > log 2>&1 # why\n\
                  cd megaburn && megaburn info 'a b' || echo megaburn";
    let lines = [
        "target/release/megaburn train --steps 3",
        "megaburn info a b",
    ];
    assert_eq!(found(script, false), lines);
    let run = "torchrun --rdzv-id megaburn --no-python bin/megaburn train";
    assert_eq!(found(run, false), ["bin/megaburn train"]);
    let lines = ["megaburn doctor --node-rank 1 --folder x/a"];
    assert_eq!(
        found(
            "srun -N 2 as-rank.sh megaburn doctor --node-rank $R --folder $DIR/a \"$@\"",
            false
        ),
        lines
    );
    assert_eq!(
        found("ssh host 'cd x; true && megaburn watch runs'", false),
        ["megaburn watch runs"]
    );
    assert_eq!(
        found("step 1 of megaburn\nmegaburn plan", true),
        ["megaburn plan"]
    );
    assert!(commands("megaburn \"x", false).is_err());
}
