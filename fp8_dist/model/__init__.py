"""Functions for whole models: conversion, filters, reports, checkpoints and export."""
