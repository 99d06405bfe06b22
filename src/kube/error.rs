//! Errors between podfs and an API server: one sentence, and whether a later try can succeed.

use std::io::{self, ErrorKind};
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::InvalidHeaderValue;
use rustls::CertificateError;
use serde::Deserialize;

use super::exec::ExecError;
use super::tls::{TlsError, is_authority_itself};

const BROKE: &str = "the connection to the server broke";

/// Why podfs cannot make a connection with the settings. Each text follows the name of the settings.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("its token has characters that no token has")]
    Token(#[source] InvalidHeaderValue),
    #[error("its tls-server-name {0:?} is not the name of a host")]
    ServerName(String),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("its proxy-url cannot be used: {0}")]
    Proxy(#[source] reqwest::Error),
    #[error("no connection can be made with it: {0}")]
    Http(#[source] reqwest::Error),
}

/// A request that did not succeed. Its text is one sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{sentence}")]
pub(crate) struct ApiError {
    pub(crate) sentence: String,
    pub(crate) class: ErrorClass,
    /// How long the server asks podfs to wait.
    pub(crate) retry_after: Option<Duration>,
    /// Whether the server had begun to answer, and the answer broke off or cannot be parsed.
    pub(crate) answered: bool,
}

/// The class of an error, which decides what to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ErrorClass {
    /// The server cannot be reached, or does not answer. This passes.
    Unreachable,
    /// The server answers that it is busy, starting or failing.
    Busy,
    /// The server no longer has the requested changes; another list is needed to find them.
    Gone,
    /// The server rejects the credentials (401).
    Unauthorized,
    /// The server forbids the request (403), until an administrator grants the right.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// There is such an object already (409).
    Conflict,
    /// The server refuses the request for another reason.
    Refused,
    /// The answer is not that of an API server.
    InvalidAnswer,
    /// The server is not the one in the settings, or does not accept podfs's certificate.
    Untrusted,
}

impl ErrorClass {
    /// Whether the same request may succeed later by itself.
    pub(crate) fn passes(self) -> bool {
        matches!(self, ErrorClass::Unreachable | ErrorClass::Busy | ErrorClass::Gone)
    }
}

/// The body of an answer that is an error.
#[derive(Default, Deserialize)]
pub(crate) struct Status {
    kind: Option<String>,
    message: Option<String>,
    code: Option<u16>,
    details: Option<Details>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Details {
    retry_after_seconds: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(class: ErrorClass, sentence: impl Into<String>) -> Self {
        Self { sentence: sentence.into(), class, retry_after: None, answered: false }
    }

    /// Marks the error as that of an answer that broke off, and not of an unreachable server.
    pub(crate) fn in_answer(self) -> Self {
        Self { answered: true, ..self }
    }

    /// Whether the error may pass within seconds, as errors of a server that has just started do.
    pub(crate) fn may_pass(&self) -> bool {
        self.class.passes() || self.class == ErrorClass::Forbidden
    }

    /// Whether there was no answer at all, because the server cannot be reached or cannot be trusted.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(self.class, ErrorClass::Unreachable | ErrorClass::Untrusted) && !self.answered
    }

    /// An answer with an error code. `action` describes the request: `list configmap default/app`.
    pub(crate) fn answered(action: &str, code: StatusCode, retry_after: Option<&str>, body: &[u8]) -> Self {
        let status: Status = serde_json::from_slice(body).unwrap_or_default();
        let after = retry_after.and_then(|seconds| seconds.trim().parse().ok());
        let after = after.or(status.details.as_ref().and_then(|details| details.retry_after_seconds));
        let mut error = match &status.message {
            Some(message) if status.kind.as_deref() == Some("Status") => {
                Self::from_message(action, code.as_u16(), message)
            }
            _ if code.is_redirection() => {
                let sentence =
                    format!("cannot {action}: the server redirects podfs ({code}), which podfs does not follow");
                Self::new(ErrorClass::InvalidAnswer, sentence)
            }
            _ => Self::without_status(action, code),
        };
        error.retry_after = after.map(Duration::from_secs);
        error
    }

    /// The error of a Status object, as the answer to a request or in the middle of a watch.
    pub(crate) fn of_status(action: &str, status: Status) -> Self {
        let Status { message, code, details, .. } = status;
        let mut error =
            Self::from_message(action, code.unwrap_or(500), message.as_deref().unwrap_or("it does not say why"));
        error.retry_after = details.and_then(|details| details.retry_after_seconds).map(Duration::from_secs);
        error
    }

    /// The server's words are the whole sentence if they name the request, as those about permissions do.
    fn from_message(action: &str, code: u16, message: &str) -> Self {
        let message = one_line(message);
        let class = class(code);
        match code {
            403 if message.contains("forbidden") => Self::new(class, message),
            _ => Self::new(class, format!("cannot {action}: the server says {message:?} ({code})")),
        }
    }

    fn without_status(action: &str, code: StatusCode) -> Self {
        let class = match class(code.as_u16()) {
            ErrorClass::NotFound | ErrorClass::Refused => ErrorClass::InvalidAnswer,
            class => class,
        };
        // The overload protection of an API server answers in plain text, as do the proxies before it.
        let sentence = match class {
            ErrorClass::Busy => format!("cannot {action}: the server is busy or not ready ({code})"),
            _ => format!("cannot {action}: the server answers {code}, and not as an API server does"),
        };
        Self::new(class, sentence)
    }

    /// The error of a request without a complete answer.
    pub(crate) fn transport(action: &str, error: &reqwest::Error) -> Self {
        let (class, cause) = cause(error);
        Self::new(class, format!("cannot {action}: {cause}"))
    }
}

fn class(code: u16) -> ErrorClass {
    match code {
        401 => ErrorClass::Unauthorized,
        403 => ErrorClass::Forbidden,
        404 => ErrorClass::NotFound,
        409 => ErrorClass::Conflict,
        410 => ErrorClass::Gone,
        408 | 429 | 500..=599 => ErrorClass::Busy,
        400..=499 => ErrorClass::Refused,
        _ => ErrorClass::InvalidAnswer,
    }
}

/// The class and the cause of an error of the HTTP client. The innermost error is the most precise. Errors of TLS name
/// the setting.
fn cause(error: &reqwest::Error) -> (ErrorClass, String) {
    if error.is_timeout() {
        return (ErrorClass::Unreachable, "the server does not answer in time".to_owned());
    }
    let mut innermost: &(dyn std::error::Error + 'static) = error;
    loop {
        if let Some(tls) = innermost.downcast_ref::<rustls::Error>() {
            return of_tls(tls);
        }
        // The errors inside of these are long and say no more.
        let kind = innermost.downcast_ref::<io::Error>().map(io::Error::kind);
        if let Some(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) = kind {
            return (ErrorClass::Unreachable, BROKE.to_owned());
        }
        let wrapped = innermost.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        innermost = match (wrapped, innermost.source()) {
            (Some(wrapped), _) => wrapped,
            (None, Some(source)) => source,
            (None, None) => break,
        };
    }
    (ErrorClass::Unreachable, unreachable(&innermost.to_string()))
}

/// Libraries report the end of a connection in many words, with a link to their own manual.
fn unreachable(text: &str) -> String {
    match text.contains("close_notify") {
        true => BROKE.to_owned(),
        false => format!("the server cannot be reached: {}", one_line(&without_links(text))),
    }
}

fn without_links(text: &str) -> String {
    let words = text.split_whitespace().filter(|word| !word.contains("://"));
    words.collect::<Vec<_>>().join(" ").trim_end_matches([':', ' ', '(']).to_owned()
}

fn of_tls(error: &rustls::Error) -> (ErrorClass, String) {
    use rustls::Error as Tls;
    const OTHER_AUTHORITY: &str = "its certificate is not signed by the certificate authority of the settings";
    let cause = match error {
        Tls::InvalidCertificate(CertificateError::UnknownIssuer) => OTHER_AUTHORITY.to_owned(),
        // The server made its certificate itself, and it is not the one in the settings.
        error if is_authority_itself(error) => OTHER_AUTHORITY.to_owned(),
        Tls::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "its certificate has expired".to_owned()
        }
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "its certificate is for another name; tls-server-name of the kubeconfig tells podfs which".to_owned(),
        Tls::InvalidCertificate(error) => {
            format!("its certificate cannot be used ({})", without_links(&error.to_string()))
        }
        Tls::AlertReceived(alert) => {
            return (ErrorClass::Untrusted, format!("the server refuses the client certificate ({alert:?})"));
        }
        other => {
            let cause = without_links(&other.to_string());
            return (ErrorClass::Unreachable, format!("the server cannot be talked to by TLS: {cause}"));
        }
    };
    (ErrorClass::Untrusted, format!("the server is not the one expected: {cause}"))
}

/// Makes one sentence of limited length from the server's text.
fn one_line(text: &str) -> String {
    const MOST: usize = 400;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "list configmap default/app";

    #[test]
    fn a_missing_permission_is_reported_in_the_servers_words() {
        let body = br#"{"kind":"Status","apiVersion":"v1","status":"Failure","code":403,"reason":"Forbidden",
            "message":"configmaps \"app\" is forbidden: User \"u\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\""}"#;
        let error = ApiError::answered(LIST, StatusCode::FORBIDDEN, None, body);
        assert_eq!(error.class, ErrorClass::Forbidden);
        let expected = r#"configmaps "app" is forbidden: User "u" cannot list resource "configmaps" in API group "" in the namespace "default""#;
        assert_eq!(error.sentence, expected);
    }

    #[test]
    fn a_busy_server_says_when_to_ask_again() {
        let error = ApiError::answered(LIST, StatusCode::TOO_MANY_REQUESTS, Some("7"), b"");
        assert_eq!((error.class, error.retry_after), (ErrorClass::Busy, Some(Duration::from_secs(7))));
        let body = br#"{"kind":"Status","message":"wait","code":503,"details":{"retryAfterSeconds":3}}"#;
        let error = ApiError::answered(LIST, StatusCode::SERVICE_UNAVAILABLE, None, body);
        assert_eq!((error.class, error.retry_after), (ErrorClass::Busy, Some(Duration::from_secs(3))));
    }

    #[test]
    fn other_servers_are_distinguished_from_api_servers() {
        let error = ApiError::answered(LIST, StatusCode::NOT_FOUND, None, b"<html>nothing here</html>");
        assert_eq!(error.class, ErrorClass::InvalidAnswer);
        assert!(error.sentence.ends_with("answers 404 Not Found, and not as an API server does"), "{error}");
        let error = ApiError::answered(LIST, StatusCode::FOUND, None, b"");
        assert!(error.sentence.contains("redirects podfs (302 Found)"), "{error}");
        let error = ApiError::answered(LIST, StatusCode::BAD_GATEWAY, None, b"<html>no backend</html>");
        assert_eq!(error.class, ErrorClass::Busy);
    }

    #[test]
    fn an_api_server_that_has_too_much_to_do_answers_in_plain_text() {
        let body = b"Too many requests, please try again later.\n";
        let error = ApiError::answered(LIST, StatusCode::TOO_MANY_REQUESTS, Some("1"), body);
        let sentence = "cannot list configmap default/app: the server is busy or not ready (429 Too Many Requests)";
        assert_eq!((error.class, error.sentence.as_str()), (ErrorClass::Busy, sentence));
    }

    #[test]
    fn errors_of_libraries_lose_their_links() {
        let link = "https://docs.rs/rustls/latest/rustls/manual/_03_howto/index.html#unexpected-eof";
        let text = format!("peer closed connection without sending TLS close_notify: {link}");
        assert_eq!(unreachable(&text), BROKE);
        assert_eq!(unreachable(&format!("no route: {link}")), "the server cannot be reached: no route");
    }

    #[test]
    fn changes_the_server_no_longer_knows_are_found_by_another_list() {
        let status = serde_json::from_str(r#"{"kind":"Status","code":410,"message":"too old resource version"}"#);
        let error = ApiError::of_status("watch configmap default/app", status.expect("a status"));
        assert_eq!(error.class, ErrorClass::Gone);
    }
}
