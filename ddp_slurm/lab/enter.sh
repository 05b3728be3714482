#!/bin/sh
# enter.sh ETC HOST ROOT COMMAND ...   run by enter.py in namespaces of its own, with sh -eu
#   ETC   folder with hosts and nsswitch.conf, and an empty folder "root"
#   HOST  host name; empty: this machine's
#   ROOT  root folder of another system; empty: this machine's
etc=$1 host=$2 root=$3
shift 3
if [ -n "$host" ]; then
    hostname "$host"
    mount -t sysfs sysfs /sys
fi
if [ -n "$root" ]; then
    mount -t tmpfs -o mode=755 tmpfs "$etc/root"
    # The release's own programs and libraries; all else, above all the work folders and /run, is
    # the machine's.
    for path in "$root"/* /*; do
        name=${path##*/}
        case $path in
            "$root"/bin | "$root"/sbin | "$root"/lib* | "$root"/usr | "$root"/etc | "$root"/var) ;;
            "$root"/* | /bin | /sbin | /lib* | /usr | /etc | /var) continue ;;
        esac
        if [ -L "$path" ]; then
            ln -s "$(readlink "$path")" "$etc/root/$name"
        elif [ -d "$path" ]; then
            mkdir "$etc/root/$name"
            mount --rbind "$path" "$etc/root/$name"
        fi
    done
fi
# With a root also in the machine's /etc: a task may leave the root to run the machine's own Python.
[ -z "$host" ] || for name in hosts nsswitch.conf; do
    mount --bind "$etc/$name" "/etc/$name"
    [ -z "$root" ] || mount --bind "$etc/$name" "$etc/root/etc/$name"
done
if [ -n "$root" ]; then
    folder=$PWD
    [ -d "$etc/root$folder" ] || folder=/ # below /var or /usr, which are the root's own
    set -- chroot "$etc/root" env -C "$folder" -- "$@"
fi
exec "$@"
