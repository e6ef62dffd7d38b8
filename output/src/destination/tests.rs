use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{PermissionsExt as _, lchown, symlink},
};

use rustix::fs::{CWD, FileType};
use tempfile::TempDir;

use super::*;

/// A user who is neither this one nor root.
const STRANGER: u32 = 65_534;

/// A folder, and a user to whom what a stranger made in it belongs to a stranger: this one if it is root and can give files away, else
/// another one.
struct Scene {
    folder: TempDir,
    own: u32,
}

impl Scene {
    fn new() -> Self {
        let own = match own() {
            0 => 0,
            user => user + 1,
        };
        Self {
            folder: tempfile::tempdir().unwrap(),
            own,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn strangers_link(&self, name: &str, target: &Path) {
        symlink(target, self.path(name)).unwrap();
        self.give_away(name);
    }

    fn give_away(&self, name: &str) {
        if self.own == 0 {
            lchown(self.path(name), Some(STRANGER), Some(STRANGER)).unwrap();
        }
    }

    fn find(&self, name: &str) -> Result<Destination> {
        resolve::destination(&self.path(name), self.own, false)
    }

    fn share(&self) {
        fs::set_permissions(self.folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    }
}

fn put(destination: &Destination, text: &str) -> Result<()> {
    destination.replace(|file| file.write_all(text.as_bytes()))
}

#[test]
fn a_link_of_somebody_else_is_followed_nowhere() {
    let scene = Scene::new();
    fs::create_dir(scene.path("real")).unwrap();
    fs::write(scene.path("precious"), "precious").unwrap();
    scene.strangers_link("folder", &scene.path("real"));
    scene.strangers_link("file", &scene.path("precious"));
    scene.strangers_link("dangling", &scene.path("real/new"));
    for name in ["folder/file", "folder/../file", "file", "dangling"] {
        let error = scene.find(name).unwrap_err();
        assert!(matches!(error, Error::ForeignLink { .. }), "{name}: {error}");
        assert!(error.to_string().contains("remove the link"), "{error}");
    }
    assert_eq!(fs::read_to_string(scene.path("precious")).unwrap(), "precious");
    assert_eq!(fs::read_dir(scene.path("real")).unwrap().count(), 0);
}

#[test]
fn own_links_are_followed_and_stay() {
    let scene = Scene::new();
    fs::create_dir_all(scene.path("a/b")).unwrap();
    symlink("a/b", scene.path("relative")).unwrap();
    symlink(scene.path("relative"), scene.path("absolute")).unwrap();
    symlink("../b/file", scene.path("a/b/link")).unwrap();
    let destination = Destination::resolve(scene.path("absolute/link")).unwrap();
    put(&destination, "text").unwrap();
    assert_eq!(fs::read_to_string(scene.path("a/b/file")).unwrap(), "text");
    assert!(fs::symlink_metadata(scene.path("a/b/link")).unwrap().is_symlink());
    symlink("loop", scene.path("loop")).unwrap();
    let error = Destination::resolve(scene.path("loop")).unwrap_err();
    assert!(error.to_string().contains("symbolic links"), "{error}");
}

#[test]
fn a_link_that_appears_later_is_not_followed() {
    let scene = Scene::new();
    fs::write(scene.path("precious"), "precious").unwrap();
    let destination = scene.find("file").unwrap();
    symlink(scene.path("precious"), scene.path("file")).unwrap();
    destination.open().unwrap_err();
    destination.check_open().unwrap_err();
    put(&destination, "new").unwrap();
    assert_eq!(fs::read_to_string(scene.path("precious")).unwrap(), "precious");
    assert_eq!(fs::read_to_string(scene.path("file")).unwrap(), "new");

    // The folder is held, not its path.
    let destination = scene.find("folder/file").err();
    assert!(destination.is_some(), "the folder is not there yet");
    fs::create_dir(scene.path("folder")).unwrap();
    fs::create_dir(scene.path("elsewhere")).unwrap();
    let destination = scene.find("folder/file").unwrap();
    fs::rename(scene.path("folder"), scene.path("moved")).unwrap();
    symlink(scene.path("elsewhere"), scene.path("folder")).unwrap();
    put(&destination, "held").unwrap();
    destination.open().unwrap().seek(SeekFrom::End(0)).unwrap();
    assert_eq!(fs::read_to_string(scene.path("moved/file")).unwrap(), "held");
    assert_eq!(fs::read_dir(scene.path("elsewhere")).unwrap().count(), 0);
}

#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let scene = Scene::new();
    let destination = scene.find("file").unwrap();
    assert!(!destination.holds_file());
    put(&destination, "first").unwrap();
    assert!(destination.holds_file());
    let failed = destination.replace(|file| {
        file.write_all(b"half of the sec")?;
        Err(io::Error::other("the disk is full"))
    });
    assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
    assert_eq!(fs::read_to_string(scene.path("file")).unwrap(), "first");
    assert_eq!(
        fs::read_dir(scene.folder.path()).unwrap().count(),
        1,
        "nothing beside it"
    );
    // What `umask` allows, as of any program.
    fs::write(scene.path("usual"), "").unwrap();
    let mode = |name: &str| fs::metadata(scene.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("file"), mode("usual"));
}

#[test]
fn temporary_names_differ_and_follow_nothing() {
    let scene = Scene::new();
    let destination = scene.find("file").unwrap();
    let Kind::Name(name) = &destination.kind else {
        panic!("a name")
    };
    let names: std::collections::BTreeSet<OsString> =
        (0..50).map(|_| name.make_temporary().unwrap().1).collect();
    assert_eq!(names.len(), 50);
}

#[test]
fn what_a_third_user_put_into_a_shared_folder_is_not_continued() {
    let scene = Scene::new();
    for name in ["strangers", "linked"] {
        fs::write(scene.path(name), "before").unwrap();
    }
    scene.give_away("strangers");
    fs::hard_link(scene.path("linked"), scene.path("other-name")).unwrap();
    if scene.own == 0 {
        // In a folder of the own, whatever is there was put there on purpose.
        scene.find("strangers").unwrap().open().unwrap();
        scene.find("linked").unwrap().open().unwrap();
    }
    scene.share();
    // To another user than root this test's own folder is a stranger's, and the stranger's files with it: those may be continued.
    if scene.own == 0 {
        let error = scene.find("strangers").unwrap().open().unwrap_err();
        assert!(matches!(error, Error::ForeignFile { owner: STRANGER }), "{error}");
    }
    let error = scene.find("linked").unwrap().check_open().unwrap_err();
    assert!(matches!(error, Error::OtherNames), "{error}");
    let mut file = scene.find("own").unwrap().open().unwrap();
    file.write_all(b"text").unwrap();
    let mut file = scene.find("own").unwrap().open().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
}

#[test]
fn a_pipe_is_opened_once_and_never_waited_for() {
    let scene = Scene::new();
    let pipe = scene.path("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let error = Destination::resolve(&pipe).unwrap_err();
    assert!(matches!(error, Error::NoReader), "{error}");
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let mut reader: File = rustix::fs::open(&pipe, flags, Mode::empty()).unwrap().into();
    let destination = Destination::resolve(&pipe).unwrap();
    assert!(destination.is_stream() && !destination.holds_file());
    put(&destination, "one ").unwrap();
    destination.open().unwrap().write_all(b"two").unwrap();
    let mut bytes = [0; 16];
    let length = reader.read(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"one two");
    let nothing = reader.read(&mut bytes).unwrap_err();
    assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock, "it is still open");
    drop(destination);
    assert_eq!(reader.read(&mut bytes).unwrap(), 0, "its end");
    let target = scene.path("standard-output");
    symlink("/proc/self/fd/1", &target).unwrap();
    assert!(Destination::resolve(&target).unwrap().is_stream());
}

#[test]
fn devices_stay_what_they_are() {
    let scene = Scene::new();
    let link = scene.path("full");
    symlink("/dev/full", &link).unwrap();
    let error = put(&Destination::resolve(&link).unwrap(), "text").unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn what_is_no_file_is_refused() {
    let scene = Scene::new();
    let _socket = std::os::unix::net::UnixListener::bind(scene.path("socket")).unwrap();
    for path in [
        scene.folder.path(),
        &scene.path("socket"),
        Path::new("/"),
        Path::new(".."),
    ] {
        let error = Destination::resolve(path).unwrap_err();
        assert!(matches!(error, Error::NotRegular), "{}: {error}", path.display());
    }
    for path in ["", "/no/such/folder/file"] {
        let error = Destination::resolve(path).unwrap_err();
        assert!(
            error.to_string().contains("No such file") || path.is_empty(),
            "{path}: {error}"
        );
    }
    fs::write(scene.path("file"), "").unwrap();
    let error = Destination::resolve(scene.path("file/below")).unwrap_err();
    assert!(error.to_string().contains("Not a directory"), "{error}");
}

#[test]
fn one_file_is_known_by_every_name() {
    let scene = Scene::new();
    let destination = |name: &str| Destination::resolve(scene.path(name)).unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    symlink("../new", scene.path("folder/link")).unwrap();
    for other in ["new", "./new", "folder/../new", "folder/link"] {
        assert!(destination("new").is_same(&destination(other)), "{other}");
    }
    assert!(!destination("new").is_same(&destination("newer")));
    fs::write(scene.path("new"), "").unwrap();
    fs::hard_link(scene.path("new"), scene.path("folder/hard")).unwrap();
    assert!(destination("new").is_same(&destination("folder/hard")));
    let device = |path: &str| Destination::resolve(path).unwrap();
    assert!(
        !device("/dev/null").is_same(&device("/dev/null")),
        "nothing is lost there"
    );
}

#[test]
fn folders_are_made_where_they_are_wanted() {
    let scene = Scene::new();
    let path = scene.path("a/b/file");
    put(&Destination::resolve_and_make_folders(&path).unwrap(), "text").unwrap();
    assert_eq!(fs::read_to_string(path).unwrap(), "text");
    Destination::resolve(scene.path("c/file")).unwrap_err();
}
