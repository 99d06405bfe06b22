//! A system call that is not on the list fails with `EPERM`, and the server logs the first of its kind.
//!
//! The filter lets the kernel send `SIGSYS` to the thread, instead of making the call. The handler puts the error into
//! the register of the result. It is async-signal-safe: no allocation, no lock, one writev(2). The signal kills a thread that
//! blocks it. The C library blocks all signals while it starts a thread, but then makes only listed calls.

use std::ffi::{c_int, c_void};
use std::io::{self, IoSlice, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use serde_json::{Map, Value};
use syscalls::Sysno;

use crate::log::line::Timestamp;
use crate::log::{self, LineFormat};

/// The end of each JSON line: the fields of the process, formatted before the handler needs them. Unset if lines are not JSON.
static JSON_END: OnceLock<String> = OnceLock::new();
/// A bit for each logged call. The last one is for all higher numbers.
static LOGGED: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];

/// Installs the handler that refuses and logs calls that a filter traps.
///
/// # Errors
/// Those of sigaction(2).
pub fn install(lines: LineFormat) -> io::Result<()> {
    if lines == LineFormat::Json {
        // Later calls change nothing.
        let _is_set = JSON_END.set(json_end(log::process_fields()));
    }
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK | SaFlags::SA_RESTART;
    let action = SigAction::new(SigHandler::SigAction(refuse), flags, SigSet::empty());
    // SAFETY: the handler is async-signal-safe.
    unsafe { sigaction(Signal::SIGSYS, &action) }?;
    Ok(())
}

/// The fields of `siginfo_t` for `SIGSYS` (sigaction(2)).
#[repr(C)]
struct SystemCall {
    signal: c_int,
    errno: c_int,
    code: c_int,
    address: *const c_void,
    number: c_int,
    architecture: u32,
}

extern "C" fn refuse(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    /// `SYS_SECCOMP` of `asm-generic/siginfo.h`.
    const BY_A_FILTER: c_int = 1;
    // SAFETY: for this signal, the kernel passes a `siginfo_t` with this layout.
    let call = unsafe { &*info.cast::<SystemCall>() };
    if call.code != BY_A_FILTER {
        // A process sent the signal, so no call was trapped.
        return;
    }
    // SAFETY: the kernel passes the thread's registers, and restores them from there.
    fail_with_eperm(unsafe { &mut *context.cast::<libc::ucontext_t>() });
    if is_first(call.number) {
        let mut line = [0; LONGEST_LINE];
        let json_end = JSON_END.get();
        let length = format(&mut line, call.number, SystemTime::now(), json_end.is_some());
        let end = json_end.map_or("\n", String::as_str);
        // An error does not matter: the log may have no reader.
        let _is_ignored =
            rustix::io::writev(rustix::stdio::stderr(), &[IoSlice::new(&line[..length]), IoSlice::new(end.as_bytes())]);
    }
}

#[cfg(target_arch = "x86_64")]
fn fail_with_eperm(context: &mut libc::ucontext_t) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM);
}

#[cfg(target_arch = "aarch64")]
fn fail_with_eperm(context: &mut libc::ucontext_t) {
    context.uc_mcontext.regs[0] = (-i64::from(libc::EPERM)).cast_unsigned();
}

fn is_first(number: c_int) -> bool {
    const LAST: usize = LOGGED.len() * u64::BITS as usize - 1;
    let place = usize::try_from(number).unwrap_or(LAST).min(LAST);
    let bit = 1 << (place % u64::BITS as usize);
    LOGGED[place / u64::BITS as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// Bytes of a log line. The buffer is small, because it is on the stack of any thread.
const LONGEST_LINE: usize = 384;

/// Writes a log line in the format of the logger, without its end. Returns its length.
fn format(line: &mut [u8], number: c_int, at: SystemTime, json: bool) -> usize {
    let name = usize::try_from(number).ok().and_then(Sysno::new).map_or("of an unknown name", |call| call.name());
    let (start, level) = match json {
        true => ("{\"timestamp\":\"", "\",\"level\":\"WARN\",\"fields\":{\"message\":\""),
        false => ("", "  WARN podfs_fuse::confinement: "),
    };
    let room = line.len();
    let mut rest = line;
    // A longer text is cut.
    let _ = write!(
        rest,
        "{start}{}{level}the system call {name} ({number}) was refused: a server does not make it, or not with these arguments",
        Timestamp(at)
    );
    room - rest.len()
}

/// The end of a JSON line, from the end of its message on.
fn json_end(fields: Map<String, Value>) -> String {
    let fields: String = fields.into_iter().map(|(name, value)| format!(",{}:{value}", Value::from(name))).collect();
    format!("\"{fields}}},\"target\":\"podfs_fuse::confinement\"}}\n")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn line(json: bool, number: i64) -> String {
        let mut line = [0; LONGEST_LINE];
        let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001);
        let length = format(&mut line, c_int::try_from(number).expect("a number"), at, json);
        let fields = Map::from_iter([("pod".to_owned(), "default/\"web\"".into())]);
        let end = if json { json_end(fields) } else { "\n".to_owned() };
        String::from_utf8(line[..length].to_vec()).expect("text") + &end
    }

    #[test]
    fn a_line_looks_like_the_loggers_and_has_the_name() {
        let text = line(false, libc::SYS_ptrace);
        assert!(
            text.starts_with("2023-11-14T22:13:20.000001Z  WARN podfs_fuse::confinement: the system call ptrace ("),
            "{text}"
        );
        assert!(text.ends_with("arguments\n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&line(true, libc::SYS_ptrace)).expect("JSON");
        assert_eq!((&json["level"], &json["timestamp"]), (&"WARN".into(), &"2023-11-14T22:13:20.000001Z".into()));
        assert!(json["fields"]["message"].as_str().expect("text").contains("the system call ptrace ("), "{json}");
        assert_eq!(
            (&json["fields"]["pod"], &json["target"]),
            (&"default/\"web\"".into(), &"podfs_fuse::confinement".into())
        );
        assert!(line(false, 100_000).contains("of an unknown name (100000)"));
    }
}
